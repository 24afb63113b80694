#include "report/page.h"

#include "report/report.h"

namespace refit::report {
namespace {

// In a script element only these can end it, or begin a comment or a line.
std::string ForScript(std::string_view json) {
  std::string text;
  text.reserve(json.size());
  for (const char c : json) {
    if (c == '<') {
      text += "\\u003c";
    } else if (c == '>') {
      text += "\\u003e";
    } else if (c == '&') {
      text += "\\u0026";
    } else {
      text += c;
    }
  }
  return text;
}

}  // namespace

std::string ReportPage(std::string_view data) {
  const size_t mark = kPage.find(kDataMark);
  std::string page(kPage.substr(0, mark));
  page += ForScript(data);
  page += kPage.substr(mark + kDataMark.size());
  return page;
}

}  // namespace refit::report
