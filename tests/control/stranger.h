// Whoever else comes to the port of a meeting, for the tests of the control
// plane.
#ifndef REFIT_TESTS_CONTROL_STRANGER_H_
#define REFIT_TESTS_CONTROL_STRANGER_H_

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "control/frame.h"
#include "control/frame_stream.h"
#include "control/membership.h"
#include "control/tcp_socket.h"
#include "tests/control/control_plane_fixture.h"

namespace refit {

// Whether the other end has closed or reset the connection.
inline bool IsDropped(const Socket& socket) {
  char bytes[4096];
  while (control::Await(socket, POLLIN, Ample())) {
    const ssize_t received = recv(socket.fd(), bytes, sizeof(bytes), 0);
    if (received == 0 || (received < 0 && errno != EAGAIN)) return true;
  }
  return false;
}

// Connects when someone listens.
inline Socket ConnectAsStranger(uint16_t port) {
  const Deadline deadline = Ample();
  absl::StatusOr<Socket> socket;
  do {
    socket = control::Connect("127.0.0.1", port, deadline);
  } while (!socket.ok() && std::chrono::steady_clock::now() < deadline);
  return *std::move(socket);
}

inline void SendText(const Socket& socket, const std::string& text) {
  EXPECT_EQ(send(socket.fd(), text.data(), text.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(text.size()));
}

// One that speaks the protocol, frame by frame.
class TalkingStranger {
 public:
  explicit TalkingStranger(uint16_t port) : stream_(ConnectAsStranger(port)) {}
  explicit TalkingStranger(Socket socket) : stream_(std::move(socket)) {}

  void Say(control::FrameType type, int32_t rank, std::string payload) {
    said_ += control::Encode(
        {.type = type, .rank = rank, .payload = std::move(payload)});
    SendText(stream_.socket(), said_.substr(sent_));
    sent_ = said_.size();
  }
  control::Frame Hear() {
    absl::StatusOr<control::Frame> frame = ReceiveFrame(stream_, Ample());
    EXPECT_TRUE(frame.ok()) << frame.status();
    return frame.ok() ? *std::move(frame) : control::Frame{};
  }

  // Says hello as `who`, and returns the challenge.
  control::Transcript Greet(const TcpRendezvous& who) {
    control::Transcript transcript = {
        .rank = who.rank,
        .hello = {.world_size = who.world_size,
                  .id_name = who.id_name,
                  .nonce = control::NewNonce()},
        .claims = {.remaining_ms = 60'000, .process = "by hand"}};
    Say(control::FrameType::kHello, who.rank, StructBytes(transcript.hello));
    const control::Frame challenge = Hear();
    EXPECT_EQ(challenge.type, control::FrameType::kChallenge);
    transcript.challenge = ParseStruct<control::Nonce>(challenge.payload)
                               .value_or(control::Nonce{});
    return transcript;
  }
  // Does what a rank does that has `who.secret`. Returns the type of the
  // answer.
  control::FrameType Prove(const TcpRendezvous& who) {
    const control::Transcript transcript = Greet(who);
    Say(control::FrameType::kProof, who.rank,
        StructBytes(control::Proof{
            transcript.claims, control::Membership(who.secret)
                                   .Prove(control::End::kRank, transcript)}));
    return Hear().type;
  }

  // All that it has said.
  const std::string& said() const { return said_; }
  const Socket& socket() const { return stream_.socket(); }

 private:
  control::FrameStream stream_;
  std::string said_;
  size_t sent_ = 0;  // of it
};

}  // namespace refit

#endif  // REFIT_TESTS_CONTROL_STRANGER_H_
