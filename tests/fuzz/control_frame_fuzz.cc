// libFuzzer target: bytes that come over a connection of the control plane are
// cut into frames, read, and done as the server does for a rank.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "control/collective_steps.h"
#include "control/frame.h"
#include "executor/transport/handshake.h"
#include "executor/transport/nccl_api.h"

namespace {

using refit::PayloadReader;
using refit::PayloadWriter;
namespace control = refit::control;

constexpr int32_t kRanks = 3;

void Require(bool holds) {
  if (!holds) std::abort();
}

// What ranks tell each other.
void ReadTold(const std::string& payload) {
  if (const auto results = control::ParseResult(payload)) {
    Require(control::ResultPayload(*results) == payload);
    Require(control::ResultBytes(*results) == payload.size());
  }
  PayloadReader reader(payload);
  refit::HandshakeRecord record;
  ReadFields(reader, record);
  if (reader.Complete()) {
    PayloadWriter writer;
    WriteFields(record, writer);
    Require(writer.Take() == payload);
    (void)refit::CompareRecords({{0, record}, {1, record}});
  }
  PayloadReader of_id(payload);
  refit::nccl::UniqueId id = {};
  ReadFields(of_id, id);
}

void Do(const control::Frame& frame, control::CollectiveSteps& steps) {
  const auto rank =
      static_cast<int32_t>(static_cast<uint32_t>(frame.rank) % kRanks);
  switch (frame.type) {
    case control::FrameType::kHello: {
      const auto hello = control::ParseHello(frame.payload);
      if (hello.has_value() && hello->version == control::kProtocolVersion) {
        Require(refit::StructBytes(*hello) == frame.payload);
      }
      break;
    }
    case control::FrameType::kProof: {
      const auto proof = refit::ParseStruct<control::Proof>(frame.payload);
      if (proof.has_value()) {
        Require(refit::StructBytes(*proof) == frame.payload);
      }
      break;
    }
    case control::FrameType::kChallenge:
    case control::FrameType::kAccepted:
      Require(refit::ParseStruct<control::Nonce>(frame.payload).has_value() ==
              (frame.payload.size() == 32));
      break;
    case control::FrameType::kBegin:
      (void)steps.Begin(rank, frame.step, frame.sequence);
      break;
    case control::FrameType::kContribution: {
      auto contribution =
          refit::ParseStruct<control::Contribution>(frame.payload);
      if (contribution.has_value()) {
        (void)steps.Contribute(rank, frame.step, frame.sequence,
                               *std::move(contribution),
                               control::CollectiveSteps::TimePoint());
      }
      break;
    }
    case control::FrameType::kAbort:
      (void)steps.Abort(rank, frame.step,
                        control::PayloadStatus(frame.payload));
      break;
    case control::FrameType::kGoodbye:
      steps.Leave(rank);
      break;
    case control::FrameType::kWelcome:
    case control::FrameType::kResult:
      ReadTold(frame.payload);
      break;
    case control::FrameType::kRefused:
    case control::FrameType::kLater:
    case control::FrameType::kAborted:
      Require(!control::PayloadStatus(frame.payload).ok());
      break;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  control::CollectiveSteps steps(kRanks, [](int32_t rank, auto bytes) {
    Require(rank >= 0 && rank < kRanks);
    control::FrameReader reader(control::kPayloadBytesMax);
    reader.Append(*bytes);
    const auto frame = reader.Next();
    Require(frame.ok() && frame->has_value());
  });
  control::FrameReader reader(control::kStrangerBytesMax);
  // Whole frames, as they would be rare in random bytes: a type, a rank, step
  // and sequence, the payload's size, the payload.
  PayloadReader input({reinterpret_cast<const char*>(data), size});
  if (size > 0 && data[0] % 2 == 0) {
    reader.Append(input.rest());
  } else {
    (void)input.U8();
    while (!input.rest().empty()) {
      control::Frame frame;
      frame.type = static_cast<control::FrameType>(input.U8() % 14);
      frame.rank = input.U8();
      frame.step = input.U8();
      frame.sequence = input.U8();
      const size_t payload = input.U8();
      frame.payload =
          std::string(input.Bytes(std::min(payload, input.rest().size())));
      reader.Append(control::Encode(frame));
    }
  }
  while (true) {
    const auto frame = reader.Next();
    if (!frame.ok() || !frame->has_value()) break;
    Do(**frame, steps);
  }
  steps.Expire(control::CollectiveSteps::TimePoint::max());
  return 0;
}
