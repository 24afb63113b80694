#include "plan/utf8.h"

namespace refit {
namespace {

// The length of the UTF-8 sequence at the front of `text`, 0 for none: no
// overlong forms, no surrogates, nothing beyond U+10FFFF.
size_t Utf8SequenceSize(std::string_view text) {
  const auto byte = [text](size_t i) -> unsigned {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
  };
  const auto continues = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return continues(1) ? 2 : 0;
  if ((lead & 0xF0) == 0xE0) {
    const bool overlong = lead == 0xE0 && byte(1) < 0xA0;
    const bool surrogate = lead == 0xED && byte(1) >= 0xA0;
    if (overlong || surrogate) return 0;
    return continues(1) && continues(2) ? 3 : 0;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    const bool overlong = lead == 0xF0 && byte(1) < 0x90;
    const bool too_far = lead == 0xF4 && byte(1) >= 0x90;
    if (overlong || too_far) return 0;
    return continues(1) && continues(2) && continues(3) ? 4 : 0;
  }
  return 0;
}

}  // namespace

size_t FirstNotUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const size_t size = Utf8SequenceSize(text.substr(i));
    if (size == 0) return i;
    i += size;
  }
  return std::string_view::npos;
}

std::string AsUtf8(std::string_view text) {
  std::string result;
  while (true) {
    const size_t bad = FirstNotUtf8(text);
    result += text.substr(0, bad);
    if (bad == std::string_view::npos) return result;
    result += "\xEF\xBF\xBD";
    text.remove_prefix(bad + 1);
  }
}

}  // namespace refit
