#include "plan/plan_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "plan/body_check.h"
#include "plan/check.h"
#include "plan/dtype.h"
#include "plan/features.h"
#include "plan/quantize_check.h"
#include "plan/scratch_windows.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

// Plan > Body > Buffer > Fragment is the deepest nesting.
constexpr uint32_t kVerifierDepth = 8;
// The offset of the root and the identifier.
constexpr size_t kSmallestFileBytes = 8;
// Of the body in the file, for its 8-byte fields and for what may come.
constexpr size_t kPlanAlignmentBytes = 16;

absl::Status ReadError(const std::string& path, int error) {
  const std::string message = absl::StrCat(path, ": ", std::strerror(error));
  if (error == ENOENT) return absl::NotFoundError(message);
  if (error == EACCES || error == EPERM) {
    return absl::PermissionDeniedError(message);
  }
  return absl::UnavailableError(message);
}

absl::Status InFile(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat(path, ": ", status.message()));
}

// Everything that `file` (a pipe, say) has to give.
absl::StatusOr<std::vector<uint8_t>> ReadAll(const std::string& path,
                                             int file) {
  std::vector<uint8_t> bytes;
  size_t size = 0;
  while (size < FLATBUFFERS_MAX_BUFFER_SIZE) {
    bytes.resize(std::max<size_t>(2 * size, 1 << 16));
    const ssize_t got = read(file, bytes.data() + size, bytes.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ReadError(path, errno);
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  bytes.resize(size);
  return bytes;
}

flatbuffers::Verifier MakeVerifier(const uint8_t* data, size_t size) {
  flatbuffers::Verifier::Options options;
  options.max_depth = kVerifierDepth;
  // A reference takes four bytes; the rest is room for lists that are shared.
  options.max_tables =
      static_cast<flatbuffers::uoffset_t>(std::max<size_t>(size, 1 << 16));
  options.check_nested_flatbuffers = false;
  return flatbuffers::Verifier(data, size, options);
}

// How much was appended to a whole plan; 0 when these bytes hold none.
size_t BytesAfterPlan(const uint8_t* data, size_t size) {
  flatbuffers::Verifier verifier = MakeVerifier(data, size);
  if (!fb::VerifyPlanBuffer(verifier)) return 0;
  const flatbuffers::Vector<uint8_t>& body = *fb::GetPlan(data)->body();
  const auto body_end = static_cast<size_t>(body.data() + body.size() - data);
  const size_t plan_end = (body_end + kPlanAlignmentBytes - 1) /
                          kPlanAlignmentBytes * kPlanAlignmentBytes;
  return size > plan_end ? size - plan_end : 0;
}

bool IsSame(const fb::Digest& a, const fb::Digest& b) {
  return a.low() == b.low() && a.high() == b.high();
}

std::string VersionText(uint32_t version) {
  return absl::StrCat(version >> 16, ".", version & 0xffff);
}

// Printable form of the four bytes of a file identifier.
std::string IdentifierText(const uint8_t* identifier) {
  std::string text;
  for (int i = 0; i < 4; ++i) {
    const uint8_t c = identifier[i];
    text += c >= 0x20 && c < 0x7f ? std::string(1, static_cast<char>(c))
                                  : absl::StrFormat("\\x%02x", c);
  }
  return text;
}

absl::Status CheckProvenance(const fb::Provenance* provenance) {
  if (provenance == nullptr) return absl::OkStatus();
  absl::Status s = CheckUtf8("the producer", provenance->producer());
  if (const auto* facts = provenance->job()) {
    for (const fb::JobFact* fact : *facts) {
      s.Update(CheckUtf8("a key of the job", fact->key()));
      s.Update(CheckUtf8("a value of the job", fact->value()));
    }
  }
  if (const fb::Estimates* estimates = provenance->estimates()) {
    s.Update(CheckUtf8("the binding link", estimates->binding_link()));
  }
  return s;
}

// Structs lie one behind the other.
template <typename T>
absl::Span<const T> PartOf(const flatbuffers::Vector<const T*>* all,
                           uint32_t begin, uint32_t count) {
  if (count == 0) return {};
  return {all->Get(begin), count};
}

}  // namespace

// The file's bytes: mapped, or owned.
class PlanFile::Bytes {
 public:
  explicit Bytes(std::vector<uint8_t> owned)
      : owned_(std::move(owned)), data_(owned_.data()), size_(owned_.size()) {}
  Bytes(void* mapping, size_t size)
      : mapping_(mapping),
        data_(static_cast<const uint8_t*>(mapping)),
        size_(size) {}
  ~Bytes() {
    if (mapping_ != nullptr) munmap(mapping_, size_);
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  std::vector<uint8_t> Take() {
    return mapping_ == nullptr ? std::move(owned_)
                               : std::vector<uint8_t>(data_, data_ + size_);
  }

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::vector<uint8_t> owned_;
  void* mapping_ = nullptr;
  const uint8_t* data_;
  size_t size_;
};

fb::Digest DigestOf(absl::Span<const uint8_t> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return fb::Digest(hash.low64, hash.high64);
}

fb::Digest FileDigestOf(absl::Span<const uint8_t> bytes, const fb::Plan& plan) {
  const auto* const field =
      reinterpret_cast<const uint8_t*>(plan.file_digest());
  const auto begin = static_cast<size_t>(field - bytes.data());
  const std::array<uint8_t, sizeof(fb::Digest)> zeros = {};
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  XXH3_128bits_update(&state, bytes.data(), begin);
  XXH3_128bits_update(&state, zeros.data(), zeros.size());
  XXH3_128bits_update(&state, field + zeros.size(),
                      bytes.size() - begin - zeros.size());
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return fb::Digest(hash.low64, hash.high64);
}

std::string DigestText(const fb::Digest& digest) {
  return absl::StrFormat("%016x%016x", digest.high(), digest.low());
}

PlanFile::PlanFile(std::unique_ptr<Bytes> bytes) : bytes_(std::move(bytes)) {}
PlanFile::PlanFile(PlanFile&&) noexcept = default;
PlanFile& PlanFile::operator=(PlanFile&&) noexcept = default;
PlanFile::~PlanFile() = default;

absl::StatusOr<PlanFile> PlanFile::Open(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return ReadError(path, errno);
  struct stat info;
  if (fstat(file, &info) != 0) {
    const int error = errno;
    close(file);
    return ReadError(path, error);
  }
  if (!S_ISREG(info.st_mode)) {
    absl::StatusOr<std::vector<uint8_t>> bytes = ReadAll(path, file);
    close(file);
    if (!bytes.ok()) return bytes.status();
    absl::StatusOr<PlanFile> plan = FromBytes(*std::move(bytes));
    if (!plan.ok()) return InFile(path, plan.status());
    return plan;
  }
  const auto size = static_cast<size_t>(info.st_size);
  if (size == 0) {
    close(file);
    return InFile(path, FromBytes({}).status());
  }
  void* mapping = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  const int error = errno;
  close(file);
  if (mapping == MAP_FAILED) return ReadError(path, error);
  PlanFile plan(std::make_unique<Bytes>(mapping, size));
  if (absl::Status status = plan.Check(); !status.ok()) {
    return InFile(path, status);
  }
  return plan;
}

absl::StatusOr<PlanFile> PlanFile::FromBytes(std::vector<uint8_t> bytes) {
  PlanFile plan(std::make_unique<Bytes>(std::move(bytes)));
  if (absl::Status status = plan.Check(); !status.ok()) return status;
  return plan;
}

absl::Status PlanFile::Check() {
  const uint8_t* data = bytes_->data();
  const size_t size = bytes_->size();
  if (size < kSmallestFileBytes) {
    return Bad("not a plan: %u bytes are too few", size);
  }
  if (!fb::PlanBufferHasIdentifier(data)) {
    return Bad("not a plan: file identifier is \"%s\" when it should be \"%s\"",
               IdentifierText(data + 4), fb::PlanIdentifier());
  }
  // A body aligned to 16 bytes makes the whole file a multiple of that; a file
  // cut inside the padding at its end is then seen as well.
  if (size >= FLATBUFFERS_MAX_BUFFER_SIZE) {
    return Bad("not a plan: %u bytes are more than 2 GiB", size);
  }
  if (size % kPlanAlignmentBytes != 0) {
    const size_t appended = BytesAfterPlan(data, size);
    return Bad(
        appended > 0
            ? absl::StrFormat("damaged: %u bytes follow the plan", appended)
            : absl::StrFormat("truncated: %u bytes are no multiple of %u", size,
                              kPlanAlignmentBytes));
  }
  flatbuffers::Verifier verifier = MakeVerifier(data, size);
  if (!fb::VerifyPlanBuffer(verifier)) {
    return Bad(
        "truncated or damaged: the %u bytes are no well-formed FlatBuffer",
        size);
  }
  plan_ = fb::GetPlan(data);
  if (absl::Status s = CheckFileDigest(); !s.ok()) return s;
  const uint32_t version = plan_->format_version();
  const std::string known = absl::StrCat(kFormatMajor, ".", kFormatMinor);
  if (version >> 16 > kFormatMajor) {
    return absl::FailedPreconditionError(
        absl::StrFormat("format version %s is newer than this build's %s",
                        VersionText(version), known));
  }
  if (version >> 16 < kFormatMajor) {
    return Bad("format version %s does not exist; this build reads %s",
               VersionText(version), known);
  }
  const uint64_t unknown = plan_->required_features() & ~kKnownFeatures;
  if (unknown != 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("required feature bit %d is unknown to this build",
                        __builtin_ctzll(unknown)));
  }
  if (plan_->inputs_digest() == nullptr || plan_->body_digest() == nullptr) {
    return Bad("the plan has no digests");
  }
  if (absl::Status s = CheckProvenance(plan_->provenance()); !s.ok()) return s;
  return CheckBodyBytes();
}

absl::Status PlanFile::CheckBodyBytes() {
  const flatbuffers::Vector<uint8_t>& body = *plan_->body();
  const fb::Digest digest = DigestOf({body.data(), body.size()});
  if (!IsSame(digest, *plan_->body_digest())) {
    return Bad("damaged: the body's digest is %s when it should be %s",
               DigestText(digest), DigestText(*plan_->body_digest()));
  }
  // Only padding follows the body: what was appended to a plan is damage that
  // the digest does not see.
  const auto after_body =
      static_cast<size_t>(bytes().end() - (body.data() + body.size()));
  if (after_body >= kPlanAlignmentBytes) {
    return Bad("damaged: %u bytes follow the body, which should end the file",
               after_body);
  }
  if (reinterpret_cast<uintptr_t>(body.data()) % kPlanAlignmentBytes != 0) {
    return Bad("the body is not aligned to %u bytes", kPlanAlignmentBytes);
  }
  flatbuffers::Verifier body_verifier = MakeVerifier(body.data(), body.size());
  if (!body_verifier.VerifyBuffer<fb::Body>(nullptr)) {
    return Bad("the body is no well-formed FlatBuffer");
  }
  body_ = flatbuffers::GetRoot<fb::Body>(body.data());
  if (absl::Status s = CheckBody(*body_, body.size()); !s.ok()) return s;
  messages_ = std::make_unique<const MessageLists>(*body_);
  return CheckFeatures(*body_, plan_->required_features());
}

absl::Status PlanFile::CheckFileDigest() const {
  // Plans of earlier builds have no such field: neither the vtable nor the
  // table has room for it. Where either has, its absence is damage.
  constexpr flatbuffers::voffset_t kTableBytes = 24 + 3 * sizeof(fb::Digest);
  const uint8_t* const vtable =
      reinterpret_cast<const flatbuffers::Table*>(plan_)->GetVTable();
  const auto word = [&](size_t i) {
    return flatbuffers::ReadScalar<flatbuffers::voffset_t>(
        vtable + i * sizeof(flatbuffers::voffset_t));
  };
  if (word(0) <= fb::Plan::VT_FILE_DIGEST && word(1) < kTableBytes) {
    return absl::OkStatus();
  }
  const fb::Digest* const wanted = plan_->file_digest();
  if (wanted == nullptr) {
    return Bad("damaged: the file's digest is missing");
  }
  const fb::Digest digest =
      FileDigestOf({bytes_->data(), bytes_->size()}, *plan_);
  if (IsSame(digest, *wanted)) return absl::OkStatus();
  return Bad("damaged: the file's digest is %s when it should be %s",
             DigestText(digest), DigestText(*wanted));
}

Estimates EstimatesOf(const PlanFile& plan) {
  const auto read = [](const auto& table) {
    return Estimates{.lower_bound_seconds = table.lower_bound_seconds(),
                     .predicted_seconds = table.predicted_seconds(),
                     .binding_link = table.binding_link() == nullptr
                                         ? ""
                                         : table.binding_link()->str()};
  };
  const fb::Provenance* provenance = plan.plan().provenance();
  if (provenance != nullptr && provenance->estimates() != nullptr) {
    return read(*provenance->estimates());
  }
  return read(*plan.body().stats());
}

absl::Span<const uint8_t> PlanFile::bytes() const {
  return {bytes_->data(), bytes_->size()};
}

std::vector<uint8_t> PlanFile::TakeBytes() && { return bytes_->Take(); }

int32_t PlanFile::source_ranks() const {
  return static_cast<int32_t>(body_->source_ranks());
}

int32_t PlanFile::world_size() const {
  return static_cast<int32_t>(body_->programs()->size());
}

fb::Side PlanFile::side(int32_t rank) const {
  return rank < source_ranks() ? fb::Side::kSource : fb::Side::kDestination;
}

uint64_t ProductOf(const flatbuffers::Vector<uint64_t>* dims) {
  uint64_t product = 1;
  for (uint32_t d = 0; d < Length(dims); ++d) product *= dims->Get(d);
  return product;
}

int32_t IndexNumber(const fb::IndexDim& dim, uint32_t position) {
  if (dim.numbers() != nullptr) return dim.numbers()->Get(position);
  return dim.first() + static_cast<int32_t>(position);
}

std::vector<int32_t> IndexNumbers(
    const flatbuffers::Vector<flatbuffers::Offset<fb::IndexDim>>* index,
    uint64_t ordinal) {
  std::vector<int32_t> numbers(Length(index));
  for (uint32_t d = Length(index); d-- > 0;) {
    const fb::IndexDim& dim = *index->Get(d);
    numbers[d] = IndexNumber(dim, static_cast<uint32_t>(ordinal % dim.count()));
    ordinal /= dim.count();
  }
  return numbers;
}

absl::Span<const fb::Copy> CopiesOf(const fb::Body& body, uint32_t list) {
  const fb::CopyList& part = *body.copy_lists()->Get(list);
  return PartOf(body.copies(), part.begin(), part.count());
}

absl::Span<const fb::Loop> LoopsOf(const fb::Body& body, const fb::Copy& copy) {
  return PartOf(body.loops(), copy.loops_begin(), copy.loops_count());
}

absl::Span<const fb::QuantizeLoop> LoopsOf(const fb::Body& body,
                                           const fb::Quantize& op) {
  return PartOf(body.quantize_loops(), op.loops_begin(), op.loops_count());
}

uint64_t CopyElements(const fb::Body& body, const fb::Copy& copy) {
  uint64_t elements = 1;
  for (const fb::Loop& loop : LoopsOf(body, copy)) elements *= loop.extent();
  return elements;
}

fb::Route RouteBetween(const fb::Body& body, uint32_t source,
                       uint32_t destination) {
  if (body.colocated() && source < body.source_ranks() &&
      destination == body.source_ranks() + source) {
    return fb::Route::kLocal;
  }
  return body.programs()->Get(source)->host() ==
                 body.programs()->Get(destination)->host()
             ? fb::Route::kPeer
             : fb::Route::kNetwork;
}

std::vector<bool> DealtReceives(const MessageLists& messages,
                                const fb::RankProgram& program) {
  const MessageVector& of_program = messages.Of(program);
  std::vector<bool> is_dealt(of_program.size(), false);
  if (program.relays() == nullptr) return is_dealt;
  for (const fb::Relay* relay : *program.relays()) {
    if (IsHeld(messages.body(), *of_program.Get(relay->message()))) {
      is_dealt[relay->fed_by()] = true;
    }
  }
  return is_dealt;
}

const fb::Message* PartnerOf(const MessageLists& messages, uint32_t rank,
                             uint32_t position) {
  const fb::Body& body = messages.body();
  const fb::RankProgram& program = *body.programs()->Get(rank);
  const MessageVector& here = messages.Of(program);
  const fb::Message& message = *here.Get(position);
  const uint32_t peer = PeerOf(body, program, message);
  // Of those of the same round, kind and peer: how many are before it.
  uint32_t before = 0;
  for (uint32_t i = position; i-- > 0;) {
    const fb::Message& other = *here.Get(i);
    if (other.round() != message.round()) break;
    before += other.kind() == message.kind() && other.peer() == message.peer();
  }
  const fb::RankProgram& there = *body.programs()->Get(peer);
  const MessageVector& of_peer = messages.Of(there);
  const auto first = std::partition_point(
      of_peer.begin(), of_peer.end(), [&](const fb::Message* other) {
        return other->round() < message.round();
      });
  for (auto it = first; it != of_peer.end(); ++it) {
    if (it->round() != message.round()) break;
    if (it->kind() == message.kind() || PeerOf(body, there, **it) != rank) {
      continue;
    }
    if (before == 0) return *it;
    --before;
  }
  return nullptr;
}

bool AreShared(const fb::RankProgram& a, const fb::RankProgram& b) {
  return a.messages() == b.messages() && a.message_list() == b.message_list() &&
         a.buffers() == b.buffers() && a.fills() == b.fills() &&
         a.staging_bytes() == b.staging_bytes() &&
         a.scratch_buffers() == b.scratch_buffers() &&
         a.quantizes() == b.quantizes() &&
         a.scratch_windows() == b.scratch_windows() &&
         a.scratch_arena_bytes() == b.scratch_arena_bytes() &&
         a.relays() == b.relays();
}

const fb::Message* FedBy(const MessageLists& messages,
                         const fb::RankProgram& program, uint32_t position) {
  if (program.relays() == nullptr) return nullptr;
  const auto& relays = *program.relays();
  const auto found = std::partition_point(
      relays.begin(), relays.end(),
      [&](const fb::Relay* relay) { return relay->message() < position; });
  if (found == relays.end() || found->message() != position) return nullptr;
  return messages.Of(program).Get(found->fed_by());
}

uint64_t ScratchBytes(const PlanFile& plan, int32_t rank) {
  return ScratchBytes(plan.body(), *plan.body().programs()->Get(rank));
}

std::string ExpandName(std::string_view pattern,
                       absl::Span<const int32_t> numbers) {
  std::string name;
  while (true) {
    const size_t open = std::min(pattern.find('{'), pattern.size());
    name.append(pattern.substr(0, open));
    pattern.remove_prefix(open);
    if (pattern.empty()) return name;
    constexpr size_t kLongest = 4;  // "{10}"
    const size_t close = pattern.substr(0, kLongest).find('}');
    uint32_t dim = 0;
    bool is_number = close != pattern.npos && close > 1;
    for (size_t i = 1; is_number && i < close; ++i) {
      is_number = pattern[i] >= '0' && pattern[i] <= '9';
      dim = 10 * dim + static_cast<uint32_t>(pattern[i] - '0');
    }
    if (is_number && dim < numbers.size()) {
      absl::StrAppend(&name, numbers[dim]);
      pattern.remove_prefix(close + 1);
    } else {
      name += pattern.front();
      pattern.remove_prefix(1);
    }
  }
}

std::string TensorName(const fb::Buffer& buffer, uint64_t ordinal) {
  return ExpandName(buffer.name()->string_view(),
                    IndexNumbers(buffer.index(), ordinal));
}

std::string TensorName(const fb::Param& param, uint64_t ordinal) {
  return ExpandName(param.name()->string_view(),
                    IndexNumbers(param.index(), ordinal));
}

}  // namespace refit
