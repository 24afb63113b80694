// Device: memory, streams, and strided copies between tables of tensors.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_DEVICE_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/schedule/coded_message.h"
#include "plan/schedule/copy_batch.h"
#include "refit/device_types.h"
#include "refit/fence.h"

namespace refit {

// A queue of work in issue order: a cudaStream_t on a GPU, ignored by a device
// that works on the calling thread.
using Stream = void*;

// How Enqueue uses a GPU's multiprocessors.
struct DeviceUse {
  enum class Way : uint8_t {
    kShare,          // as the batch's share says
    kBulk,           // copies by bulk copies, where the device has these
    kBesideDigests,  // of what a checked refit moves: as few as keep the link
                     // busy beside its digests
    kBesideRounds,   // of digests: half of them, while the rounds go on
    kFew,            // somewhat more than a link needs, in bulk: beside kMost
    kMost,           // all others, in bulk
  };
  Way way = Way::kShare;
  uint32_t at_most = 0;  // of kBulk: multiprocessors; 0: all

  friend auto operator<=>(const DeviceUse&, const DeviceUse&) = default;
};

// Batches prepared for a device. Enqueue allocates and checks nothing.
class PreparedCopies {
 public:
  virtual ~PreparedCopies() = default;
  // Enqueues batch number `batch`; of a kDigest what is not begun
  // (CopyBatch::begun). Its bytes are in place when `stream` reaches this
  // point. If `unless` is given and its word is not 0 by then, the batch does
  // nothing.
  virtual absl::Status Enqueue(size_t batch, Stream stream,
                               const uint32_t* unless = nullptr,
                               const DeviceUse& use = {}) = 0;
  // Likewise one step of the batch: nothing, if it has no such step. All of
  // them, in any order, are the batch.
  virtual absl::Status EnqueueStep(size_t batch, uint32_t step, Stream stream,
                                   const uint32_t* unless = nullptr,
                                   const DeviceUse& use = {}) = 0;
};

struct ChangedElements {
  uint64_t count = 0;  // each of its own size, without those always sent
  uint64_t room = 0;   // enough for them and for those always sent
};

// A CodedMessage whose elements stay in tensors: what is sent of them is read
// there, and what is received is stored there.
struct MessageToCode {
  CodedMessage message;  // of no elements: it always travels whole
  bool is_send = false;
  // By rung: for how many elements its code has room. 0: it travels whole.
  std::vector<uint64_t> rooms;
  std::byte* code = nullptr;  // where it is coded, aligned to 8 bytes
  // `from`: where elements lie in tensors; `to`: where in the message, of which
  // no two copies take the same byte, its entry unused. Elements are aligned to
  // their size in both. Ascending in the message, each copy without gaps. The
  // dtypes are those of the tensor and of the message: a receive casts from
  // `to` to `from`.
  std::vector<StridedCopy> copies;
  std::vector<CopyLoop> loops;
  std::vector<bool> always;  // by copy of a send: sent though it did not change
};

// What tells a MessageCoder that an element of a send changed.
enum class ChangesBy : uint8_t {
  // It differs from its shadow, which stands as far from the address of its
  // entry as the element from its own, and is aligned as the element is.
  kShadows,
  // A mark that somebody else sets and clears: of element i of entry e, bit
  // i % 32 of the 32-bit word i / 32 that the table has for e.
  kMarks,
};

// Entry e of the table, of which a send reads, has its shadow or its marks in
// entry e + `entries`.
struct ChangeEntries {
  ChangesBy by = ChangesBy::kShadows;
  uint64_t entries = 0;
};

// The first receive that no message is encoded like.
struct CodingFailure {
  size_t message = 0;
  absl::Status why;  // kDataLoss
};

// Finds, encodes and applies what changed in messages, on streams of a device;
// all devices write the same codes. Messages are named by their numbers
// [begin, begin + count); those that are of the other kind, or travel whole,
// are left alone. Enqueuing allocates nothing.
class MessageCoder {
 public:
  virtual ~MessageCoder() = default;
  // Forgets what was counted, and failures.
  virtual absl::Status Restart(Stream stream) = 0;
  // Remembers which elements of all sends changed, by their shadows or their
  // marks. Once after Restart. Shadows, and what is sent, must be as they are
  // now until all is kept; marks may be cleared behind this.
  virtual absl::Status Count(Stream stream) = 0;
  // By message. Requires: `stream`, on which they were counted, is done; no
  // other is used. Valid until the next call.
  virtual absl::StatusOr<absl::Span<const ChangedElements>> Counted(
      Stream stream) = 0;
  // Writes codes of sends. Requires: there is room for what was counted.
  virtual absl::Status Encode(size_t begin, size_t count, size_t rung,
                              Stream stream) = 0;
  // Stores what codes of receives hold into their tensors. It writes nothing
  // beyond the elements of the message, whatever the code holds.
  virtual absl::Status Apply(size_t begin, size_t count, size_t rung,
                             Stream stream) = 0;
  // Stores what was counted in any send into its shadow. By marks: does
  // nothing.
  virtual absl::Status Keep(Stream stream) = 0;
  // Since Restart, of what is done. Waits for `stream`.
  virtual absl::StatusOr<std::optional<CodingFailure>> FirstFailure(
      Stream stream) = 0;
};

// Memory of a device, freed by scope.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  std::byte* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }

 protected:
  DeviceMemory(std::byte* data, uint64_t size_bytes)
      : data_(data), size_bytes_(size_bytes) {}

 private:
  std::byte* data_;
  uint64_t size_bytes_;
};

// A stream of the device, freed by scope.
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;
  virtual Stream get() const = 0;
};

// A point of a stream for which others wait. Record again to move
// it.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  virtual absl::Status Record(Stream stream) = 0;
  // Work enqueued on `stream` from now on starts after the recorded point.
  virtual absl::Status Await(Stream stream) = 0;
  // Whether the recorded point was reached; an error of the device's work.
  virtual absl::StatusOr<bool> Reached() = 0;
  // An error of the device's work, where Reached does not ask for it.
  virtual absl::Status Failure() { return absl::OkStatus(); }
};

// The time between two points of streams.
class DeviceTimer {
 public:
  virtual ~DeviceTimer() = default;
  virtual absl::Status Start(Stream stream) = 0;
  virtual absl::Status Stop(Stream stream) = 0;
  // Requires: both points were reached.
  virtual absl::StatusOr<double> Seconds() = 0;
  // From the start of `origin`, a timer of the same device, to that of this
  // one. Requires: both were reached.
  virtual absl::StatusOr<double> SecondsAfter(const DeviceTimer& origin) = 0;
};

// Shows any thread how far enqueued work has come.
class DeviceProgress {
 public:
  virtual ~DeviceProgress() = default;
  // `reached` is `value` once `stream` comes to this point.
  virtual absl::Status Mark(uint32_t value, Stream stream) = 0;
  virtual void Reset() = 0;  // to 0
  virtual uint32_t reached() const = 0;
};

// Recorded work that can be launched again. Destroying it does not stop what
// was launched.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  virtual absl::Status Launch(Stream stream) = 0;
};

// Notices freed memory, even if its addresses are in use again.
class MemoryWatch {
 public:
  virtual ~MemoryWatch() = default;
  // The first range whose memory was freed.
  virtual std::optional<size_t> FirstGone() = 0;
  // The ranges of which no end would be noticed, ascending.
  virtual std::vector<size_t> Unwatched() const { return {}; }
};

// Contiguous memory to share with other ranks.
struct MemoryRange {
  std::byte* data = nullptr;
  uint64_t size_bytes = 0;
};

// Ranges that other ranks may map, until the end of scope.
class ExportedMemory {
 public:
  virtual ~ExportedMemory() = default;
  // What they need for it, to send to them: a token that nobody can guess, and
  // handles for other processes. No address.
  const std::string& bytes() const { return bytes_; }

 protected:
  explicit ExportedMemory(std::string bytes) : bytes_(std::move(bytes)) {}

 private:
  const std::string bytes_;
};

// Another rank's ranges as this device reaches them, until the end of scope.
class MappedMemory {
 public:
  virtual ~MappedMemory() = default;
  // In the order of the Export.
  virtual absl::Span<std::byte* const> addresses() const = 0;
};

// A fence between ranks, made of words in device memory or of waiting
// threads.
class DeviceFence : public Fence {
 public:
  // The bytes that peers need to signal here.
  virtual absl::StatusOr<std::string> Export() = 0;
  // `exported[i]` is the Export of `peers[i]`. The counters begin at zero, so
  // no rank may signal before all have connected. Signals and an abort stay in
  // the words, so a session after them needs a new fence.
  virtual absl::Status Connect(
      absl::Span<const int32_t> peers, absl::Span<const std::string> exported,
      std::chrono::steady_clock::time_point deadline) = 0;
  // Lets the streams' Awaits pass, to work that ObserveAbort stops; where the
  // calling thread waits, its Awaits fail. Nothing undoes it, and it waits for
  // nothing: not for the device either.
  // Thread-safe.
  virtual void Abort() = 0;
  // The peers that the stream (or the calling thread) waits for now, for a
  // message; none if it does not wait. Thread-safe.
  virtual std::vector<int32_t> Waiting() const = 0;
};

// Thread-safe: one device may serve several ranks.
class Device {
 public:
  virtual ~Device() = default;

  // Makes this the calling thread's current device, which NCCL goes by; other
  // calls here do not depend on it and leave it as it was.
  virtual absl::Status MakeCurrent() = 0;

  // Calls `body` while this is the calling thread's current device, and leaves
  // that as it was.
  virtual absl::Status WhileCurrent(absl::FunctionRef<absl::Status()> body) {
    return body();
  }

  // For a thread of Refit's own: this is its current device from now on, and
  // its calls disturb no capture of another thread.
  virtual absl::Status MakeThreadOwn() { return MakeCurrent(); }

  // What tells this device from all others of all hosts, also one part of a GPU
  // from another (MIG); "": nothing does.
  virtual std::string Identity() { return ""; }

  // At least 256-byte aligned, contents unspecified. Error: kResourceExhausted.
  virtual absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(
      uint64_t size_bytes) = 0;

  // Makes `batches` ready over `table`. Requires: every copy inside the memory
  // at its entries. That memory must outlive the result; the arguments need
  // not.
  virtual absl::StatusOr<std::unique_ptr<PreparedCopies>> Prepare(
      absl::Span<std::byte* const> table,
      absl::Span<const CopyBatch> batches) = 0;

  // Makes messages ready whose tensors are in `table`, and what tells of their
  // changes. That memory must outlive the result, `table` need not.
  virtual absl::StatusOr<std::unique_ptr<MessageCoder>> PrepareCodes(
      absl::Span<std::byte* const> table, const ChangeEntries& changes,
      std::vector<MessageToCode> messages) = 0;

  virtual absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream() = 0;
  // Whether `stream` is capturing, so that work goes into a graph.
  virtual absl::StatusOr<bool> IsCapturing(Stream stream) = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() = 0;
  // An event that any thread may poll at any time: its Reached calls no driver,
  // which might wait for the device, or break another thread's capture. Nothing
  // that is captured may record it.
  virtual absl::StatusOr<std::unique_ptr<DeviceEvent>> CreatePolledEvent() {
    return CreateEvent();
  }
  virtual absl::StatusOr<std::unique_ptr<DeviceTimer>> CreateTimer() = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceProgress>> CreateProgress() = 0;

  // What `enqueue` enqueues on the stream that it is given, and on streams that
  // it makes wait for that one, which it must make wait for them in turn. None
  // of it runs. Null: a device that cannot record; `enqueue` is not called.
  virtual absl::StatusOr<std::unique_ptr<DeviceGraph>> Record(
      const std::function<absl::Status(Stream)>& enqueue) = 0;

  // Null: a device that cannot tell.
  virtual absl::StatusOr<std::unique_ptr<MemoryWatch>> Watch(
      absl::Span<const MemoryRange> ranges) = 0;

  // Whether its memory is the host's.
  virtual bool IsHost() const { return false; }

  // Whether it has bulk copies, which need so few multiprocessors that others
  // have room beside them.
  virtual bool CopiesInBulk() const { return false; }

  // Whether what its streams do overlaps. Not where a process has one hardware
  // queue (CUDA_DEVICE_MAX_CONNECTIONS=1): a kernel waits there for all that
  // was enqueued before it, on any stream.
  virtual bool OverlapsStreams() const { return true; }

  // Whether copies accept elements that are not aligned to their size.
  virtual bool CopiesUnaligned() const = 0;

  // Enqueues a contiguous copy between ranges that do not overlap; each may be
  // of this device or of the host.
  virtual absl::Status Copy(std::byte* to, const std::byte* from,
                            uint64_t size_bytes, Stream stream) = 0;

  // Enqueues `cast`. It rounds to nearest even; NaN stays a quiet NaN with its
  // sign. Bits are compared, so -0 is a change from 0. Error: kInvalidArgument,
  // another dtype, null pointers, alignment.
  virtual absl::Status CastAndMark(const MarkingCast& cast, Stream stream) = 0;

  // Returns when all work enqueued on `stream` is done, with its first error.
  virtual absl::Status Synchronize(Stream stream) = 0;

  // Lets ranks of the same host reach `ranges`. Memory that cannot be shared is
  // no error yet: some ranks may need nothing to reach it. Error:
  // kFailedPrecondition, no memory of the device.
  virtual absl::StatusOr<std::unique_ptr<ExportedMemory>> Export(
      absl::Span<const MemoryRange> ranges) = 0;
  // Maps a peer's ranges, whose sizes have to be `sizes_bytes`. Whatever
  // `exported` holds, the addresses that are returned are of exported memory
  // of those sizes. Errors: kFailedPrecondition, kept for memory that this rank
  // cannot reach, though its owner may be able to reach this rank's;
  // kInvalidArgument, no export, or one of other sizes; kNotFound, the owner is
  // in this process and shows it no longer; kDeadlineExceeded, the owner's
  // process did not answer.
  virtual absl::StatusOr<std::unique_ptr<MappedMemory>> Import(
      std::string_view exported, absl::Span<const uint64_t> sizes_bytes,
      std::chrono::steady_clock::time_point deadline) = 0;

  // `sharing`: the peers that use the same device, so that a wait for them must
  // leave it to them. They have to name this rank too.
  virtual absl::StatusOr<std::unique_ptr<DeviceFence>> CreateFence(
      int32_t rank, int32_t world_size, absl::Span<const int32_t> sharing) = 0;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_DEVICE_H_
