#include "tests/plan/proof_oracle.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "plan/dtype.h"

namespace refit {
namespace {

// What an element holds: an element of a param, or one of these.
constexpr int64_t kUnset = -1;
constexpr int64_t kZero = -2;
constexpr int64_t kSkipped = -3;

struct Value {
  int64_t element = kUnset;
  DType stored = DType::kUnspecified;  // at the source
  friend bool operator==(const Value&, const Value&) = default;
};

struct StagedByte {
  Value value;
  DType wire = DType::kUnspecified;
  int64_t byte = 0;
  int writes = 0;
  bool from_source = false;  // packed by a source
};

uint64_t Product(const std::vector<uint64_t>& sizes) {
  uint64_t product = 1;
  for (uint64_t size : sizes) product *= size;
  return product;
}

template <typename Stack>
std::vector<uint64_t> VirtualShape(const Stack& stack) {
  std::vector<uint64_t> shape;
  for (const PlanSpec::IndexDim& dim : stack.index) shape.push_back(dim.count);
  shape.insert(shape.end(), stack.shape.begin(), stack.shape.end());
  return shape;
}

// Calls `visit` with every coordinate of a box, row-major.
void ForEach(const std::vector<uint64_t>& extent,
             const std::function<void(const std::vector<uint64_t>&)>& visit) {
  const uint64_t count = Product(extent);
  std::vector<uint64_t> at(extent.size());
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t rest = i;
    for (size_t d = extent.size(); d-- > 0;) {
      at[d] = rest % extent[d];
      rest /= extent[d];
    }
    visit(at);
  }
}

std::vector<uint64_t> OffsetsOf(uint64_t offset,
                                const std::vector<uint64_t>& extent,
                                const std::vector<uint64_t>& stride) {
  std::vector<uint64_t> offsets;
  ForEach(extent, [&](const std::vector<uint64_t>& at) {
    uint64_t element = offset;
    for (size_t d = 0; d < at.size(); ++d) element += at[d] * stride[d];
    offsets.push_back(element);
  });
  return offsets;
}

std::vector<uint64_t> OffsetsOf(const PlanSpec::Copy& copy) {
  std::vector<uint64_t> extent;
  std::vector<uint64_t> stride;
  for (const fb::Loop& loop : copy.loops) {
    extent.push_back(loop.extent());
    stride.push_back(loop.stride());
  }
  return OffsetsOf(copy.offset, extent, stride);
}

template <typename Stack>
std::vector<std::string> NamesOf(const Stack& stack) {
  std::vector<uint64_t> counts;
  for (const PlanSpec::IndexDim& dim : stack.index) counts.push_back(dim.count);
  std::vector<std::string> names;
  ForEach(counts, [&](const std::vector<uint64_t>& at) {
    std::string name = stack.name;
    for (size_t d = 0; d < at.size(); ++d) {
      const std::string hole = absl::StrCat("{", d, "}");
      const size_t position = name.find(hole);
      if (position == name.npos) continue;
      const PlanSpec::IndexDim& dim = stack.index[d];
      name.replace(position, hole.size(),
                   absl::StrCat(dim.numbers.empty()
                                    ? dim.first + static_cast<int64_t>(at[d])
                                    : dim.numbers[at[d]]));
    }
    names.push_back(name);
  });
  return names;
}

class Oracle {
 public:
  explicit Oracle(const PlanSpec& spec) : spec_(spec) {}

  std::string Run() {
    for (const auto& step :
         {&Oracle::Declarations, &Oracle::Layout, &Oracle::Schedule,
          &Oracle::Staging, &Oracle::Holding, &Oracle::Data,
          &Oracle::Outcome}) {
      if (fault_.empty()) (this->*step)();
    }
    return fault_;
  }

 private:
  bool IsSource(size_t rank) const { return rank < spec_.source_ranks; }
  bool IsDirect(uint32_t round) const {
    return round < spec_.mechanisms.size() &&
           spec_.mechanisms[round] == fb::Mechanism::kDirect;
  }
  const PlanSpec::Buffer& BufferAt(size_t rank, size_t slot) const {
    return spec_.buffers[spec_.programs[rank].buffers[slot]];
  }
  // Whether `rank` sends what it received, and packs nothing.
  bool IsHeld(size_t rank, const fb::Message& message) const {
    return !IsSource(rank) && message.kind() == fb::MessageKind::kSend &&
           message.size_bytes() > 0 && !IsDirect(message.round()) &&
           spec_.copy_lists[message.copies()].empty();
  }
  void Fault(const std::string& text) {
    if (fault_.empty()) fault_ = text;
  }

  void Declarations();
  void Layout();
  void Schedule();
  void Staging();
  void Holding();
  void Data();
  void Outcome();
  // When a scratch buffer may be quantized into or from: before this round.
  enum class When { kEarly, kLate };
  bool IsScratch(size_t rank, size_t slot) const {
    const PlanSpec::Program& program = spec_.programs[rank];
    return slot >= program.buffers.size() - program.scratch_buffers;
  }
  const fb::ScratchWindow* WindowOf(size_t rank, size_t slot) const;
  bool ShareBytes(size_t rank, size_t slot, size_t other) const;
  void Refit(When when);
  void QuantizeBefore(uint32_t round, When when);
  uint32_t RoundOf(size_t rank, const fb::Quantize& op, When when);
  void Quantize(size_t rank, const fb::Quantize& op);
  void QuantizeBlock(size_t rank, const fb::Quantize& op,
                     const std::vector<std::pair<uint64_t, uint64_t>>& block,
                     uint64_t scale);
  // Memory of scratch: each byte remembers which element was written last.
  const Value& Read(size_t rank, size_t slot, uint64_t element);
  void Write(size_t rank, size_t slot, uint64_t element, const Value& value);
  template <typename Visit>
  void ForBytes(size_t rank, size_t slot, uint64_t element, const Visit& visit);

  std::vector<StagedByte> Pack(size_t source, const fb::Message& send);
  void Unpack(const std::vector<StagedByte>& staged, const fb::Message& send,
              size_t destination, const fb::Message& recv);

  const PlanSpec& spec_;
  std::string fault_;
  // By rank, slot, element.
  std::vector<std::vector<std::vector<int64_t>>> wanted_;
  std::vector<std::vector<std::vector<Value>>> held_;
  std::vector<std::vector<std::vector<int>>> writes_;
  std::vector<int64_t> first_element_;  // by param
  // By rank and byte of the scratch arena: slot and element.
  std::vector<std::vector<std::pair<size_t, uint64_t>>> arenas_;
  std::vector<std::vector<StagedByte>> staging_;  // by rank: what came last
  std::vector<std::tuple<size_t, fb::Message, size_t, fb::Message>> pairs_;
};

void Oracle::Declarations() {
  for (const PlanSpec::Cast& cast : spec_.casts) {
    if (!IsSupportedCast(cast.from, cast.to)) Fault("no such cast");
  }
  std::set<std::string> params;
  for (const PlanSpec::Param& param : spec_.params) {
    for (const std::string& name : NamesOf(param)) {
      if (!params.insert(name).second) Fault("two params " + name);
    }
  }
  for (size_t rank = 0; rank < spec_.programs.size(); ++rank) {
    std::set<std::string> names;
    for (uint32_t buffer : spec_.programs[rank].buffers) {
      for (const std::string& name : NamesOf(spec_.buffers[buffer])) {
        if (!names.insert(name).second) Fault("two buffers " + name);
      }
    }
    if (IsSource(rank) &&
        !spec_.copy_lists[spec_.programs[rank].fills].empty()) {
      Fault("fills on a source");
    }
  }
}

// Gives each element of each buffer its meaning.
void Oracle::Layout() {
  std::map<std::pair<uint32_t, uint64_t>, DType> source_dtypes;
  int64_t next = 0;
  for (const PlanSpec::Param& param : spec_.params) {
    first_element_.push_back(next);
    next += static_cast<int64_t>(Product(VirtualShape(param)));
  }
  for (size_t rank = 0; rank < spec_.programs.size(); ++rank) {
    auto& of_rank = wanted_.emplace_back();
    auto& held = held_.emplace_back();
    auto& writes = writes_.emplace_back();
    for (size_t slot = 0; slot < spec_.programs[rank].buffers.size(); ++slot) {
      const PlanSpec::Buffer& buffer = BufferAt(rank, slot);
      const uint64_t elements = Product(VirtualShape(buffer));
      std::vector<int64_t>& wanted = of_rank.emplace_back(elements, kUnset);
      std::vector<bool> skipped(elements);
      std::vector<std::pair<uint32_t, uint64_t>> tensor_of(elements);
      const auto claim = [&](uint64_t element, int64_t value) {
        if (wanted[element] != kUnset) Fault("two parts hold one element");
        wanted[element] = value;
      };
      for (const PlanSpec::Fragment& fragment : buffer.fragments) {
        const PlanSpec::Param& param = spec_.params[fragment.param];
        const std::vector<uint64_t> shape = VirtualShape(param);
        const std::vector<uint64_t> offsets =
            OffsetsOf(fragment.offset, fragment.extent, fragment.stride);
        const uint64_t tensor_elements = Product(param.shape);
        size_t i = 0;
        ForEach(fragment.extent, [&](const std::vector<uint64_t>& at) {
          uint64_t flat = 0;
          for (size_t d = 0; d < at.size(); ++d) {
            flat = flat * shape[d] + fragment.lo[d] + at[d];
          }
          const uint64_t element = offsets[i++];
          claim(element,
                first_element_[fragment.param] + static_cast<int64_t>(flat));
          tensor_of[element] = {fragment.param, flat / tensor_elements};
          skipped[element] = param.skip != fb::SkipReason::kUnspecified;
        });
      }
      for (const PlanSpec::Region& region : buffer.regions) {
        for (uint64_t element :
             OffsetsOf(region.offset, region.extent, region.stride)) {
          claim(element,
                region.kind == fb::RegionKind::kFill ? kZero : kSkipped);
        }
      }
      std::vector<Value>& values = held.emplace_back(elements);
      writes.emplace_back(elements, 0);
      for (uint64_t element = 0; element < elements; ++element) {
        if (IsSource(rank) && wanted[element] >= 0 &&
            source_dtypes.emplace(tensor_of[element], buffer.dtype)
                    .first->second != buffer.dtype) {
          Fault("a tensor in two dtypes");
        }
        if (!IsSource(rank) && wanted[element] == kUnset &&
            !IsScratch(rank, slot)) {
          Fault("an element has no part");
        }
        if (skipped[element]) wanted[element] = kSkipped;
        if (IsSource(rank) && wanted[element] >= 0 && !IsScratch(rank, slot)) {
          values[element] = {wanted[element], buffer.dtype};
        }
      }
    }
  }
}

void Oracle::Schedule() {
  if (spec_.slots == 0) Fault("no slots");
  std::map<std::tuple<uint32_t, size_t, size_t>, std::deque<fb::Message>> sent;
  for (size_t rank = 0; rank < spec_.programs.size(); ++rank) {
    const PlanSpec::Program& program = spec_.programs[rank];
    if (program.staging_bytes > spec_.staging_bytes) Fault("staging limit");
    std::map<uint32_t, uint64_t> operations;
    for (size_t i = 0; i < program.messages.size(); ++i) {
      const fb::Message& message = program.messages[i];
      if (!IsDirect(message.round())) {
        // 32: what NCCL surely launches as one kernel.
        if (++operations[message.round()] >
            std::min<uint32_t>(spec_.operations_per_round, 32)) {
          Fault("operations limit");
        }
        if (message.size_bytes() > spec_.bucket_bytes) Fault("bucket limit");
      }
      const auto order = [](const fb::Message& m) {
        return std::tuple(m.round(), m.kind() == fb::MessageKind::kSend,
                          m.peer());
      };
      if (i > 0 && order(message) < order(program.messages[i - 1])) {
        Fault("order");
      }
      const bool is_send = message.kind() == fb::MessageKind::kSend;
      if (IsSource(is_send ? message.peer() : rank)) Fault("wrong side");
      const size_t apart = std::max<size_t>(rank, message.peer()) -
                           std::min<size_t>(rank, message.peer());
      const fb::Route route =
          spec_.colocated && apart == spec_.source_ranks &&
                  IsSource(std::min<size_t>(rank, message.peer()))
              ? fb::Route::kLocal
          : program.host == spec_.programs[message.peer()].host
              ? fb::Route::kPeer
              : fb::Route::kNetwork;
      const bool is_beside =
          route == fb::Route::kPeer &&
          spec_.rounds[message.round()] == fb::Route::kNetwork;
      if (spec_.rounds[message.round()] != route && !is_beside) Fault("route");
      if (IsHeld(rank, message) &&
          spec_.rounds[message.round()] != fb::Route::kNetwork) {
        Fault("deals elsewhere than in a round between hosts");
      }
      if (route == fb::Route::kNetwork && IsDirect(message.round())) {
        Fault("direct over the network");
      }
      if (message.kind() == fb::MessageKind::kSend) {
        sent[{message.round(), rank, message.peer()}].push_back(message);
      }
    }
  }
  for (size_t rank = 0; rank < spec_.programs.size(); ++rank) {
    for (const fb::Message& message : spec_.programs[rank].messages) {
      if (message.kind() != fb::MessageKind::kRecv) continue;
      auto& queue = sent[{message.round(), message.peer(), rank}];
      if (queue.empty() || queue.front().size_bytes() != message.size_bytes()) {
        return Fault("unmatched receive");
      }
      pairs_.emplace_back(message.peer(), queue.front(), rank, message);
      queue.pop_front();
    }
  }
  for (const auto& [channel, queue] : sent) {
    if (!queue.empty()) Fault("unmatched send");
  }
}

// What a rank holds stays where it came until it is sent.
void Oracle::Holding() {
  for (size_t rank = spec_.source_ranks; rank < spec_.programs.size(); ++rank) {
    const PlanSpec::Program& program = spec_.programs[rank];
    for (size_t i = 0; i < program.messages.size(); ++i) {
      const fb::Message& held = program.messages[i];
      if (held.kind() != fb::MessageKind::kSend || held.size_bytes() == 0 ||
          !spec_.copy_lists[held.copies()].empty()) {
        continue;
      }
      const auto relay = std::find_if(
          program.relays.begin(), program.relays.end(),
          [&](const fb::Relay& entry) { return entry.message() == i; });
      if (relay == program.relays.end() || IsDirect(held.round())) {
        return Fault("holds nothing");
      }
      const fb::Message& feed = program.messages[relay->fed_by()];
      const uint64_t end = held.staging_offset() + held.size_bytes();
      if (IsDirect(feed.round()) ||
          held.staging_offset() < feed.staging_offset() ||
          end > feed.staging_offset() + feed.size_bytes()) {
        return Fault("holds something else");
      }
      if (held.round() > feed.round() + spec_.slots + 1) {
        return Fault("holds for too long");
      }
      for (const fb::Message& other : program.messages) {
        const bool meets =
            !IsDirect(other.round()) && other.size_bytes() > 0 &&
            !IsHeld(rank, other) && other.staging_offset() < end &&
            held.staging_offset() < other.staging_offset() + other.size_bytes();
        const bool sends = other.kind() == fb::MessageKind::kSend;
        if (meets && other.round() > feed.round() &&
            other.round() < held.round() + (sends ? spec_.slots : 1)) {
          return Fault("what is held is overwritten");
        }
      }
    }
  }
}

void Oracle::Staging() {
  for (size_t rank = 0; rank < spec_.programs.size(); ++rank) {
    const PlanSpec::Program& program = spec_.programs[rank];
    for (size_t i = 0; i < program.messages.size(); ++i) {
      const fb::Message& a = program.messages[i];
      if (IsDirect(a.round())) continue;
      if (a.staging_offset() % 16 != 0) Fault("alignment");
      if (IsHeld(rank, a)) continue;
      for (size_t j = 0; j < i; ++j) {
        const fb::Message& b = program.messages[j];
        if (IsDirect(b.round()) || IsHeld(rank, b)) continue;
        const uint32_t apart =
            std::max(a.round(), b.round()) - std::min(a.round(), b.round());
        if (apart < spec_.slots &&
            a.staging_offset() < b.staging_offset() + b.size_bytes() &&
            b.staging_offset() < a.staging_offset() + a.size_bytes() &&
            a.size_bytes() > 0 && b.size_bytes() > 0) {
          Fault("staging is shared");
        }
      }
    }
  }
}

std::vector<StagedByte> Oracle::Pack(size_t source, const fb::Message& send) {
  if (IsHeld(source, send)) {
    const auto begin =
        staging_[source].begin() + static_cast<int64_t>(send.staging_offset());
    return {begin, begin + static_cast<int64_t>(send.size_bytes())};
  }
  std::vector<StagedByte> staged(send.size_bytes());
  for (const PlanSpec::Copy& copy : spec_.copy_lists[send.copies()]) {
    if (copy.staging_offset % 16 != 0) Fault("alignment");
    const PlanSpec::Buffer& buffer = BufferAt(source, copy.slot);
    if (!IsSource(source) && copy.dtype != buffer.dtype) Fault("relay casts");
    int64_t byte = static_cast<int64_t>(copy.staging_offset);
    for (uint64_t element : OffsetsOf(copy)) {
      Value value = Read(source, copy.slot, element);
      if (value.element < 0) {
        Fault("packs what holds no param");
        return staged;
      }
      if (!IsSource(source)) value.stored = buffer.dtype;
      if (value.stored != buffer.dtype) Fault("impossible");
      for (int64_t k = 0; k < DTypeBytes(copy.dtype); ++k, ++byte) {
        StagedByte& staged_byte = staged[static_cast<size_t>(byte)];
        if (++staged_byte.writes > 1) Fault("packs a byte twice");
        staged_byte = {value, copy.dtype, k, 1, IsSource(source)};
      }
    }
  }
  return staged;
}

void Oracle::Unpack(const std::vector<StagedByte>& staged,
                    const fb::Message& send, size_t destination,
                    const fb::Message& recv) {
  for (const PlanSpec::Copy& copy : spec_.copy_lists[recv.copies()]) {
    if (copy.staging_offset % 16 != 0) Fault("alignment");
    const std::vector<PlanSpec::Copy>& sent = spec_.copy_lists[send.copies()];
    const auto is_one = [&](const PlanSpec::Copy& other) {
      return other.staging_offset == copy.staging_offset &&
             OffsetsOf(other).size() == OffsetsOf(copy).size();
    };
    if (IsDirect(recv.round()) &&
        std::none_of(sent.begin(), sent.end(), is_one)) {
      Fault("a direct copy of two");
    }
    const DType to = BufferAt(destination, copy.slot).dtype;
    size_t byte = copy.staging_offset;
    for (uint64_t element : OffsetsOf(copy)) {
      const StagedByte first = staged[byte];
      for (int64_t k = 0; k < DTypeBytes(copy.dtype); ++k, ++byte) {
        const StagedByte& read = staged[byte];
        if (read.value != first.value || read.byte != k ||
            read.wire != copy.dtype) {
          return Fault("reads staging that holds no such element");
        }
      }
      const DType from = first.value.stored;
      if (!first.from_source && from != to) return Fault("cast after a relay");
      if (from != first.wire && first.wire != to) return Fault("cast twice");
      if (from != to && std::none_of(spec_.casts.begin(), spec_.casts.end(),
                                     [&](const PlanSpec::Cast& cast) {
                                       return cast.from == from &&
                                              cast.to == to;
                                     })) {
        return Fault("cast without declaration");
      }
      Write(destination, copy.slot, element, first.value);
    }
  }
}

const fb::ScratchWindow* Oracle::WindowOf(size_t rank, size_t slot) const {
  const PlanSpec::Program& program = spec_.programs[rank];
  if (program.scratch_windows.empty() || !IsScratch(rank, slot)) return nullptr;
  return &program.scratch_windows[slot + program.scratch_buffers -
                                  program.buffers.size()];
}

bool Oracle::ShareBytes(size_t rank, size_t slot, size_t other) const {
  const auto end = [&](size_t s) {
    const PlanSpec::Buffer& buffer = BufferAt(rank, s);
    return WindowOf(rank, s)->offset() +
           Product(VirtualShape(buffer)) *
               static_cast<uint64_t>(DTypeBytes(buffer.dtype));
  };
  return WindowOf(rank, slot)->offset() < end(other) &&
         WindowOf(rank, other)->offset() < end(slot);
}

template <typename Visit>
void Oracle::ForBytes(size_t rank, size_t slot, uint64_t element,
                      const Visit& visit) {
  const fb::ScratchWindow* window = WindowOf(rank, slot);
  if (window == nullptr) return;
  const auto width =
      static_cast<uint64_t>(DTypeBytes(BufferAt(rank, slot).dtype));
  for (uint64_t byte = 0; byte < width; ++byte) {
    visit(arenas_[rank][window->offset() + element * width + byte]);
  }
}

const Value& Oracle::Read(size_t rank, size_t slot, uint64_t element) {
  ForBytes(rank, slot, element, [&](const auto& owner) {
    if (owner != std::pair(slot, element)) Fault("scratch is overwritten");
  });
  return held_[rank][slot][element];
}

void Oracle::Write(size_t rank, size_t slot, uint64_t element,
                   const Value& value) {
  ForBytes(rank, slot, element,
           [&](auto& owner) { owner = std::pair(slot, element); });
  held_[rank][slot][element] = value;
  ++writes_[rank][slot][element];
}

// The earliest or the latest round before which the windows let it be done.
uint32_t Oracle::RoundOf(size_t rank, const fb::Quantize& op, When when) {
  const auto rounds = static_cast<uint32_t>(spec_.rounds.size());
  uint32_t earliest = IsSource(rank) ? 0 : rounds;
  uint32_t latest = earliest;
  const fb::ScratchWindow* first = nullptr;
  for (const uint32_t slot :
       {op.input_slot(), op.output_slot(), op.scale_slot()}) {
    const fb::ScratchWindow* window = WindowOf(rank, slot);
    if (window == nullptr) continue;
    if (first == nullptr) {
      first = window;
      earliest = IsSource(rank) ? 0 : window->end();
      latest = IsSource(rank) ? window->begin() : rounds;
    } else if (window->begin() != first->begin() ||
               window->end() != first->end()) {
      Fault("two windows");
    }
    for (size_t other = 0; other < spec_.programs[rank].buffers.size();
         ++other) {
      const fb::ScratchWindow* neighbour = WindowOf(rank, other);
      if (neighbour == nullptr || !ShareBytes(rank, slot, other)) continue;
      if (IsSource(rank) && neighbour->end() <= window->begin()) {
        earliest = std::max(earliest, neighbour->end());
      } else if (!IsSource(rank) && neighbour->begin() >= window->end()) {
        latest = std::min(latest, neighbour->begin());
      }
    }
  }
  return when == When::kEarly ? earliest : latest;
}

void Oracle::QuantizeBefore(uint32_t round, When when) {
  for (size_t rank = 0; rank < spec_.programs.size(); ++rank) {
    for (const fb::Quantize& op : spec_.programs[rank].quantizes) {
      if (RoundOf(rank, op, when) == round) Quantize(rank, op);
    }
  }
}

// A block's values and its scale are right when it reads all of one block of
// the param and nothing else.
void Oracle::QuantizeBlock(
    size_t rank, const fb::Quantize& op,
    const std::vector<std::pair<uint64_t, uint64_t>>& block, uint64_t scale) {
  const PlanSpec::Quantization& quantization =
      spec_.quantizations[op.quantization()];
  const std::vector<uint64_t>& shape = spec_.params[quantization.of].shape;
  const uint64_t grid_columns = spec_.params[quantization.scales].shape[1];
  const auto elements = static_cast<int64_t>(
      Product(VirtualShape(spec_.params[quantization.of])));
  std::set<uint64_t> read;
  uint64_t row = 0, column = 0, matrix = 0;
  for (const auto& [input, output] : block) {
    const Value& value = Read(rank, op.input_slot(), input);
    const int64_t flat = value.element - first_element_[quantization.of];
    if (value.element < 0 || flat < 0 || flat >= elements) {
      return Fault("quantizes what is not of the param");
    }
    const auto at = static_cast<uint64_t>(flat);
    matrix = at / (shape[0] * shape[1]);
    row = at % (shape[0] * shape[1]) / shape[1] / quantization.block_rows;
    column = at % shape[1] / quantization.block_columns;
    read.insert(at);
    Write(rank, op.output_slot(), output,
          {first_element_[quantization.data] + flat, DType::kFp8E4m3});
  }
  std::set<uint64_t> wanted;
  for (uint64_t r = row * quantization.block_rows;
       r < std::min<uint64_t>(shape[0], (row + 1) * quantization.block_rows);
       ++r) {
    for (uint64_t c = column * quantization.block_columns;
         c < std::min<uint64_t>(shape[1],
                                (column + 1) * quantization.block_columns);
         ++c) {
      wanted.insert((matrix * shape[0] + r) * shape[1] + c);
    }
  }
  if (read != wanted) return Fault("quantizes what is no block");
  const std::vector<uint64_t>& grid = spec_.params[quantization.scales].shape;
  Write(rank, op.scale_slot(), scale,
        {first_element_[quantization.scales] +
             static_cast<int64_t>((matrix * grid[0] + row) * grid_columns +
                                  column),
         BufferAt(rank, op.scale_slot()).dtype});
}

void Oracle::Quantize(size_t rank, const fb::Quantize& op) {
  const PlanSpec::Quantization& quantization =
      spec_.quantizations[op.quantization()];
  std::vector<uint64_t> extent;
  const auto loops = spec_.quantize_loops.begin() + op.loops_begin();
  for (uint32_t i = 0; i < op.loops_count(); ++i) {
    extent.push_back(loops[i].extent());
  }
  ForEach(extent, [&](const std::vector<uint64_t>& at) {
    uint64_t input = op.input_offset();
    uint64_t output = op.output_offset();
    uint64_t scale = op.scale_offset();
    for (size_t d = 0; d < at.size(); ++d) {
      input += at[d] * loops[d].input_stride();
      output += at[d] * loops[d].output_stride();
      scale += at[d] * loops[d].scale_stride();
    }
    // Input and output elements by block.
    std::map<std::pair<uint64_t, uint64_t>,
             std::vector<std::pair<uint64_t, uint64_t>>>
        blocks;
    for (uint64_t r = 0; r < op.rows(); ++r) {
      for (uint64_t c = 0; c < op.columns(); ++c) {
        blocks[{r / quantization.block_rows, c / quantization.block_columns}]
            .emplace_back(input + r * op.input_row_stride() + c,
                          output + r * op.output_row_stride() + c);
      }
    }
    for (const auto& [block, elements] : blocks) {
      QuantizeBlock(rank, op, elements,
                    scale + block.first * op.scale_row_stride() + block.second);
      if (!fault_.empty()) return;
    }
  });
}

// Whenever the windows let the blocks be quantized, the outcome is the same.
void Oracle::Data() {
  const auto held = held_;
  const auto writes = writes_;
  Refit(When::kEarly);
  held_ = held;
  writes_ = writes;
  if (fault_.empty()) Refit(When::kLate);
}

void Oracle::Refit(When when) {
  arenas_.clear();
  staging_.clear();
  for (const PlanSpec::Program& program : spec_.programs) {
    arenas_.emplace_back(program.scratch_arena_bytes,
                         std::pair(size_t{0}, ~uint64_t{0}));
    staging_.emplace_back(program.staging_bytes);
  }
  // Round by round: nothing that a round writes is there when it reads.
  for (uint32_t round = 0; round < spec_.rounds.size(); ++round) {
    QuantizeBefore(round, when);
    std::vector<std::vector<StagedByte>> staged;
    for (const auto& [source, send, destination, recv] : pairs_) {
      if (send.round() == round) staged.push_back(Pack(source, send));
    }
    if (!fault_.empty()) return;
    size_t next = 0;
    for (const auto& [source, send, destination, recv] : pairs_) {
      if (send.round() != round) continue;
      const std::vector<StagedByte>& bytes = staged[next++];
      Unpack(bytes, send, destination, recv);
      if (IsDirect(round)) continue;
      std::copy(bytes.begin(), bytes.end(),
                staging_[destination].begin() +
                    static_cast<int64_t>(recv.staging_offset()));
    }
  }
  QuantizeBefore(static_cast<uint32_t>(spec_.rounds.size()), when);
  for (size_t rank = spec_.source_ranks; rank < spec_.programs.size(); ++rank) {
    for (const PlanSpec::Copy& copy :
         spec_.copy_lists[spec_.programs[rank].fills]) {
      for (uint64_t element : OffsetsOf(copy)) {
        held_[rank][copy.slot][element] = {kZero, DType::kUnspecified};
        ++writes_[rank][copy.slot][element];
      }
    }
  }
}

void Oracle::Outcome() {
  for (size_t rank = spec_.source_ranks; rank < spec_.programs.size(); ++rank) {
    for (size_t slot = 0; slot < wanted_[rank].size(); ++slot) {
      for (size_t i = 0; i < wanted_[rank][slot].size(); ++i) {
        const int64_t wanted = wanted_[rank][slot][i];
        const bool is_written = wanted != kSkipped && wanted != kUnset;
        if (writes_[rank][slot][i] != (is_written ? 1 : 0)) {
          return Fault(
              absl::StrCat("written ", writes_[rank][slot][i], " times"));
        }
        if (is_written && held_[rank][slot][i].element != wanted) {
          return Fault("wrong element");
        }
      }
    }
  }
}

}  // namespace

std::string FaultOf(const PlanSpec& spec) { return Oracle(spec).Run(); }

}  // namespace refit
