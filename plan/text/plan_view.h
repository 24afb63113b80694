// What the text, the JSON, the statistics and the diff all say of a plan, and
// which entries a reader asked to see.
#ifndef REFIT_PLAN_TEXT_PLAN_VIEW_H_
#define REFIT_PLAN_TEXT_PLAN_VIEW_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "plan/enum_text.h"
#include "plan/plan_file.h"
#include "plan/text/text.h"
#include "plan/vector_length.h"

namespace refit {

using IndexDims = flatbuffers::Vector<flatbuffers::Offset<fb::IndexDim>>;

// "plan 1.12 features 0x201"; of a plan that requires none, "plan 1.1".
std::string FormatText(const fb::Plan& plan);

// "0..3, 8": runs of consecutive numbers, in the order given; "" for none.
std::string NumberSetText(absl::Span<const int32_t> numbers);

// " {0}=0..47 {1}=0, 2, 4"; "" when there is no index dimension.
std::string IndexText(const IndexDims* index);

// The name in double quotes, anything unprintable escaped.
std::string QuotedText(std::string_view name);
std::string QuotedText(const flatbuffers::String* name);

// "[4096, 2048]"
std::string DimsText(const flatbuffers::Vector<uint64_t>* dims);

// `negative-exp "what to do"`
std::string PostHookText(const fb::PostHook& hook);

// "[0:24, 512:1024]"
std::string BoxText(const fb::Fragment& fragment);

// The copies of which a send carries the bytes. A send that deals out has none
// of its own: it carries a part of what another rank packed.
struct SentCopies {
  uint32_t packer = 0;  // the rank whose buffer slots the copies name
  std::vector<const fb::Copy*> copies;
};
SentCopies SentCopiesOf(const MessageLists& messages, uint32_t rank,
                        uint32_t position);

// Bytes that each send carries, without alignment gaps. The sum over all sends
// of a plan is what the statistics call moved.
class SendPayloads {
 public:
  // Keeps a reference to `messages`.
  explicit SendPayloads(const MessageLists& messages);

  uint64_t Bytes(uint32_t rank, uint32_t position) const;

 private:
  const MessageLists& messages_;
  std::vector<uint64_t> by_list_;  // ranks share lists
};

// The ranks that hold each of Body.buffers, ascending.
std::vector<std::vector<int32_t>> HoldersByBuffer(const fb::Body& body);

// The ranks of each host, both ascending.
std::map<uint32_t, std::vector<int32_t>> RanksByHost(const fb::Body& body);

// The entries of a plan that a reader asked for.
struct PlanView {
  // The shown messages of one rank.
  struct Program {
    int32_t rank = 0;
    std::vector<uint32_t> messages;  // positions in RankProgram.messages
    bool fills = false;
    std::vector<uint32_t> quantizes;  // positions in RankProgram.quantizes
  };

  // By position in the body's tables.
  std::vector<bool> params;
  std::vector<bool> quantizations;  // of a shown param
  std::vector<bool> buffers;
  std::vector<bool> rounds;
  std::vector<bool> copy_lists;
  std::vector<bool> copies;  // of shown copy lists
  std::vector<bool> skips;
  // Shown buffers of which only the fragments of shown params are shown.
  std::vector<bool> partial_buffers;

  std::vector<Program> programs;  // by rank
};

// Without a glob: everything, or all that one rank uses. With a glob: params
// and buffers with a tensor of a matching name, buffers that hold such a
// param, params that such a buffer holds, and the copies that touch an element
// of a match. Requires that `options.rank` is a rank of the plan.
PlanView SelectView(const PlanFile& plan, const TextOptions& options);

}  // namespace refit

#endif  // REFIT_PLAN_TEXT_PLAN_VIEW_H_
