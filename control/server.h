// The middle of the control plane's star: a thread that all ranks, rank 0 too,
// are connected with. Who listens owns it: rank 0, or the meeting's host.
#ifndef REFIT_CONTROL_SERVER_H_
#define REFIT_CONTROL_SERVER_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control/collective_steps.h"
#include "control/frame_stream.h"
#include "control/membership.h"
#include "control/tcp_socket.h"
#include "control/waiting.h"
#include "refit/control_plane.h"

namespace refit::control {

// "process 123 on host gpu-7".
std::string ProcessText();

// Who was there, and could come again, is gone after this time: a process that
// is started anew takes longer.
inline constexpr std::chrono::seconds kGoneTime{3};

// Who listens, in messages.
inline const char* ListenerOf(bool hosted) {
  return hosted ? "the meeting's host" : "rank 0";
}

class ControlServer {
 public:
  // Serves the ranks that come to `listener`, and a rank of this process at the
  // other end of `own`. Without a descriptor: nobody comes there. The server
  // ends by itself when all ranks have met and left, or a member has ended the
  // meeting; a host's tells late ranks for two seconds that it is over. Error:
  // kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<ControlServer>> Start(
      const TcpRendezvous& rendezvous, Socket listener, Socket own);

  // Ends it, and does not wait. Ranks that wait in the meeting are told to come
  // again; those that have met, that the server has closed.
  void Stop();

  // From now on nobody waits for its thread, which touches nothing of this once
  // is_over(): it may be destroyed then, and not before.
  void Detach() { thread_.detach(); }

  uint64_t id_name() const { return id_name_; }
  // Whether all ranks have met, also if they have left since. Thread-safe.
  bool has_met() const { return has_met_; }
  // Whether its thread has ended. Thread-safe.
  bool is_over() const { return is_over_; }
  // Which ranks wait for the others: "waiting: rank 0; came and left: rank 2;
  // missing: ranks 1, 3". Thread-safe.
  std::string WhoCame() const;

  // Stops it, and waits, for a limited time, until the ranks have read all that
  // was sent to them.
  ~ControlServer();

 private:
  enum class Phase : uint8_t {
    kMeeting,  // until all ranks have come
    kEnded,    // perhaps for good. For a while who comes is told why
    kMet,
    kClosing,  // sends what it has, and reads only to see the ends close
  };

  // A stranger until it has proved to be a rank.
  struct Connection {
    explicit Connection(Socket socket);
    bool IsStranger() const { return rank < 0 && !over; }

    FrameStream stream;
    int32_t rank = -1;  // -1: it has not proved which
    // From its hello on.
    std::optional<Transcript> transcript;
    // For the stranger to prove who it is, for the meeting to be complete, or
    // for a connection that closes to be closed.
    Clock::time_point deadline;
    bool ends_meeting = false;  // proved; kNoRank
    bool closing = false;       // after all is sent
    bool over = false;          // to be removed
  };

  // The deadline of a rank of this process until it has proved itself.
  static constexpr Clock::time_point kNoDeadline = Clock::time_point::max();

  ControlServer(const TcpRendezvous& rendezvous, Socket listener,
                std::pair<Socket, Socket> ends);

  void Run();
  void Poll();
  void AcceptSome();
  bool EvictStranger();
  void Receive(Connection& connection);
  bool Handle(Connection& connection, Frame& frame);
  bool HandleInStep(Connection& connection, Frame& frame);
  bool HandleHello(Connection& connection, const Frame& frame);
  bool HandleProof(Connection& connection, const Frame& frame);
  bool HandleEnd(Connection& connection, const Frame& frame);
  absl::Status CheckHello(int32_t rank, const Hello& hello) const;
  absl::Status CheckProof(const Transcript& transcript,
                          const Proof& proof) const;
  void Expire(Clock::time_point now);
  std::vector<int32_t> Absent() const;
  void Remove(int32_t rank);
  // Refuses all that have come, with `status`, and those who come while it
  // stays.
  void EndMeeting(const absl::Status& status, Clock::duration stay);
  void EndMeetingIfLeft(Clock::time_point now);
  bool TellEnded(Connection& connection);
  Clock::time_point NextEvent() const;

  static void Queue(Connection& connection, SharedBytes bytes);
  static void Send(Connection& connection, const Frame& frame) {
    Queue(connection, EncodeShared(frame));
  }
  void SendToAll(const Frame& frame);
  void Flush(Connection& connection);
  // Tells the other end why, then closes. Returns true, as Handle and what it
  // calls do where the sender keeps to the protocol.
  bool Refuse(Connection& connection, const absl::Status& status,
              FrameType type = FrameType::kRefused);
  size_t AbsentCount() const {
    return static_cast<size_t>(
        std::count(by_rank_.begin(), by_rank_.end(), nullptr));
  }
  bool NobodyIsHere() const { return AbsentCount() == by_rank_.size(); }
  bool IsLeft() const;
  absl::Status UsedStatus() const;
  // All ranks have met and left.
  void EndUse();
  // Tells the other end to come again, then closes.
  bool PutOff(Connection& connection);
  void CloseWhenSent(Connection& connection);
  // The other end closed, failed, or does not keep to the protocol.
  void Lose(Connection& connection, const absl::Status& reason);
  void Leave(int32_t rank, const std::string& lost = "");
  void Close();

  const int32_t world_size_;
  const char* const name_;  // of who listens, in messages
  const uint64_t id_name_;
  const bool hosted_;
  const Membership membership_;
  Socket owner_end_;  // closed by Stop()
  Socket owner_;      // its other end, until the server has seen that
  Socket listener_;
  Clock::time_point accept_again_;  // after descriptors had run out
  Phase phase_ = Phase::kMeeting;
  std::vector<std::unique_ptr<Connection>> connections_;
  // The server's thread writes these two under the mutex, and others read them.
  mutable std::mutex who_came_mutex_;
  std::vector<Connection*> by_rank_;    // null: not there
  std::vector<std::string> processes_;  // by rank; "" if it never came
  // Of ranks that were let in and lost their connection before all had come:
  // until when they may come again.
  struct Left {
    int32_t rank;
    Clock::time_point until;
    std::string reason;
  };
  std::vector<Left> left_;
  std::string trouble_;  // of the meeting, the last
  WaitReminder meeting_reminder_;
  absl::Status ended_;  // why the meeting did
  Clock::time_point ended_until_;
  std::vector<bool> told_;  // of that, by rank
  CollectiveSteps steps_;
  bool in_vain_ = false;  // a member has ended the meeting
  std::atomic<bool> has_met_ = false;
  std::atomic<bool> is_over_ = false;
  std::thread thread_;
};

}  // namespace refit::control

#endif  // REFIT_CONTROL_SERVER_H_
