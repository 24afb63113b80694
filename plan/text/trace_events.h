// Traces of a refit in the JSON of Chrome's trace events, which Perfetto opens:
// a process for each rank with a track for each of its streams, and an arrow
// for each message. Simulated and measured refits have the same names.
#ifndef REFIT_PLAN_TEXT_TRACE_EVENTS_H_
#define REFIT_PLAN_TEXT_TRACE_EVENTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "plan/plan_file.h"
#include "plan/text/text_sink.h"

namespace refit {

// Tracks of a rank. Slices of one track do not overlap: Perfetto wants that.
// Rounds on a GPU have a track of their own, since others go on beside them.
enum class Track : uint8_t {
  kRounds = 1,
  kPacks,
  kUnpacks,
  kQuantizes,
  kReceived,
  kOwnRounds,
};

// "round 3 network", "round 3 peer direct": as a profiler shows the executor's.
std::string RoundText(const PlanFile& plan, uint32_t round);

// Not thread-safe. Times are in seconds from the start of the refit.
class TraceEvents {
 public:
  // Ranks are processes `first_process` and up, so that two traces in one file
  // have different ones. `kind` follows each rank's name, "" for nothing. The
  // file goes to `sink` while events come.
  TraceEvents(const PlanFile& plan, uint32_t first_process,
              std::string_view kind, TextSink sink);

  void NameProcess(uint32_t process, std::string_view name);
  void Slice(int32_t rank, Track track, std::string_view name, double begin,
             double end);
  // A round of a rank, by its name.
  void Round(int32_t rank, uint32_t round, double begin, double end);
  // What a message's sender and receiver did for it in a round. `number`: of
  // the message in this trace. `held_by`: the link that held it down.
  struct MessageTimes {
    uint32_t number = 0;
    int32_t source = 0;
    int32_t destination = 0;
    uint32_t round = 0;
    uint64_t size_bytes = 0;
    double begin = 0;
    double end = 0;
    std::optional<std::string> held_by;
  };
  void Message(const MessageTimes& message);
  // The share of a link's speed from `seconds` on.
  void Share(uint32_t process, std::string_view link, double seconds,
             double share);

  // The last piece of the file. Nothing comes after it.
  void End();

 private:
  void Name(uint32_t process, std::optional<Track> track,
            std::string_view name);
  // Before an event: the comma after the last one.
  void Begin();

  const PlanFile& plan_;
  const uint32_t first_process_;
  const TextSink sink_;
  std::string text_;  // that `sink_` has not got yet
  bool is_first_ = true;
};

}  // namespace refit

#endif  // REFIT_PLAN_TEXT_TRACE_EVENTS_H_
