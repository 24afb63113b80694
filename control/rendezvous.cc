#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "control/file_descriptor.h"
#include "control/log.h"
#include "control/tcp_socket.h"
#include "control/token.h"
#include "refit/control_plane.h"

namespace refit {
namespace {

constexpr int32_t kDefaultPort = 29500;  // torchrun's

// A launcher's variables for one thing, in the order in which they count. Open
// MPI's come before SLURM's: where mpirun starts its daemons through SLURM,
// their variables reach the ranks too, and number the hosts.
constexpr const char* kRank[] = {"RANK", "OMPI_COMM_WORLD_RANK",
                                 "SLURM_PROCID"};
constexpr const char* kWorldSize[] = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE",
                                      "SLURM_NTASKS"};
constexpr const char* kLocalRank[] = {
    "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"};
// A step may run on a part of its job's hosts, so its list comes first.
constexpr const char* kHostList[] = {"SLURM_STEP_NODELIST", "SLURM_NODELIST"};

constexpr char kSecret[] = "REFIT_SECRET";
constexpr char kSecretFile[] = "REFIT_SECRET_FILE";
constexpr size_t kSecretBytesMin = 16;
constexpr size_t kSecretFileBytesMax = 4096;

struct Variable {
  const char* name;
  std::string value;
};

// The first that is set.
std::optional<Variable> Find(absl::Span<const char* const> names) {
  for (const char* name : names) {
    const char* const value = std::getenv(name);
    if (value != nullptr) return Variable{name, value};
  }
  return std::nullopt;
}

absl::Status WrongValue(const Variable& variable, const std::string& wanted) {
  return absl::InvalidArgumentError(absl::StrCat(
      variable.name, " is \"", variable.value, "\", it should be ", wanted));
}

absl::StatusOr<int32_t> Number(const Variable& variable, int32_t min,
                               int32_t max) {
  int32_t number = 0;
  if (!absl::SimpleAtoi(variable.value, &number) || number < min ||
      number > max) {
    return WrongValue(variable,
                      absl::StrCat("a number from ", min, " to ", max));
  }
  return number;
}

absl::StatusOr<int32_t> RequiredNumber(absl::Span<const char* const> names,
                                       int32_t min, int32_t max) {
  const std::optional<Variable> variable = Find(names);
  if (variable.has_value()) return Number(*variable, min, max);
  return absl::InvalidArgumentError(
      absl::StrCat(names[0], " is not set (nor ", names[1], " nor ", names[2],
                   "), it should be a number from ", min, " to ", max));
}

// The first host of SLURM's short form: "gpu[07-09,12],login1" is gpu07 and
// more. "" if it is none.
std::string FirstHost(std::string_view list) {
  std::string host;
  for (size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host.push_back(list[i]);
      continue;
    }
    const size_t end = list.find(']', i);
    if (end == std::string_view::npos) return "";
    const std::string_view numbers = list.substr(i + 1, end - i - 1);
    host.append(numbers.substr(0, numbers.find_first_of(",-")));
    i = end;
  }
  return host;
}

absl::StatusOr<std::string> Host(int32_t world_size) {
  if (const auto address = Find({"MASTER_ADDR"})) {
    if (!address->value.empty()) return address->value;
    return WrongValue(*address, "rank 0's host name or address");
  }
  if (const auto hosts = Find(kHostList)) {
    std::string host = FirstHost(hosts->value);
    if (!host.empty()) return host;
    return WrongValue(*hosts, "a list of hosts like \"gpu[07-09,12]\"");
  }
  if (const auto launch = Find({"SLURM_LAUNCH_NODE_IPADDR"})) {
    if (!launch->value.empty()) return launch->value;
    return WrongValue(*launch, "an address");
  }
  if (world_size == 1) return std::string("localhost");
  return absl::InvalidArgumentError(
      "MASTER_ADDR is not set, it should be rank 0's host name or address");
}

absl::StatusOr<uint16_t> Port() {
  if (const auto own = Find({"REFIT_PORT"})) {
    return Number(*own, 1, 65535);
  }
  const auto master = Find({"MASTER_PORT"});
  if (!master.has_value()) return kDefaultPort;
  // torchrun's agent listens at MASTER_PORT itself, and says so.
  const char* const agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  const bool taken = agent != nullptr && std::string_view(agent) == "True";
  const absl::StatusOr<int32_t> port =
      Number(*master, 1, taken ? 65534 : 65535);
  if (!port.ok()) return port.status();
  return taken ? *port + 1 : *port;
}

absl::StatusOr<std::string> ReadSecret(const Variable& file) {
  const auto unusable = [&](const std::string& why) {
    return absl::StrCat(file.name, " is \"", file.value, "\", ", why);
  };
  const FileDescriptor open_file(
      open(file.value.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  std::string secret(kSecretFileBytesMax + 1, '\0');
  const ssize_t size = open_file.fd() < 0
                           ? -1
                           : read(open_file.fd(), secret.data(), secret.size());
  if (size < 0) {
    return absl::InvalidArgumentError(
        unusable(absl::StrCat("which cannot be read: ", std::strerror(errno))));
  }
  if (static_cast<size_t>(size) > kSecretFileBytesMax) {
    return absl::InvalidArgumentError(
        unusable(absl::StrCat("which has more than the ", kSecretFileBytesMax,
                              " bytes of a secret")));
  }
  secret.resize(static_cast<size_t>(size));
  absl::StripTrailingAsciiWhitespace(&secret);
  return secret;
}

}  // namespace

absl::StatusOr<TcpRendezvous> RendezvousFromEnvironment() {
  const absl::StatusOr<int32_t> world_size =
      RequiredNumber(kWorldSize, 1, TcpRendezvous::kWorldSizeMax);
  if (!world_size.ok()) return world_size.status();
  const absl::StatusOr<int32_t> rank =
      RequiredNumber(kRank, 0, *world_size - 1);
  if (!rank.ok()) return rank.status();
  const absl::StatusOr<std::string> host = Host(*world_size);
  if (!host.ok()) return host.status();
  const absl::StatusOr<uint16_t> port = Port();
  if (!port.ok()) return port.status();
  absl::StatusOr<std::string> secret = SecretFromEnvironment();
  if (!secret.ok()) return secret.status();
  return TcpRendezvous{.host = *host,
                       .port = *port,
                       .rank = *rank,
                       .world_size = *world_size,
                       .secret = *std::move(secret)};
}

absl::StatusOr<std::string> SecretFromEnvironment() {
  const auto given = Find({kSecret});
  const auto file = Find({kSecretFile});
  if (given.has_value() && file.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        kSecret, " and ", kSecretFile, " are both set, one of them suffices"));
  }
  std::string secret;
  if (given.has_value()) secret = given->value;
  if (file.has_value()) {
    absl::StatusOr<std::string> read = ReadSecret(*file);
    if (!read.ok()) return read.status();
    secret = *std::move(read);
  }
  if ((given.has_value() || file.has_value()) && secret.empty()) {
    return absl::InvalidArgumentError(
        given.has_value()
            ? absl::StrCat(kSecret,
                           " is empty, it should be a secret of 16 "
                           "bytes or more")
            : absl::StrCat(kSecretFile, " is \"", file->value,
                           "\", which is empty; it should hold a secret of 16 "
                           "bytes or more"));
  }
  static std::atomic<bool> said = false;
  if (!secret.empty() && secret.size() < kSecretBytesMin &&
      !said.exchange(true)) {
    Log(LogLevel::kWarning,
        absl::StrCat(given.has_value() ? kSecret : kSecretFile, " has ",
                     secret.size(), " bytes; a secret of fewer than ",
                     kSecretBytesMin, " random bytes can be guessed"));
  }
  return secret;
}

absl::StatusOr<int32_t> LocalRankFromEnvironment() {
  return RequiredNumber(kLocalRank, 0, TcpRendezvous::kWorldSizeMax - 1);
}

absl::StatusOr<TcpRendezvous> LoopbackRendezvous(int32_t world_size) {
  auto socket = std::make_shared<const Socket>(
      ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  // Rank 0 may bind to the port beside this socket, which does not listen.
  const int yes = 1;
  setsockopt(socket->fd(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(socket->fd(), reinterpret_cast<sockaddr*>(&address),
           sizeof(address)) != 0) {
    return absl::UnavailableError("no free port on the loopback interface");
  }
  return TcpRendezvous{.host = "127.0.0.1",
                       .port = control::BoundTo(*socket).port,
                       .rank = 0,
                       .world_size = world_size,
                       .secret = std::string(TokenBytes(NewToken())),
                       .port_holder = std::move(socket)};
}

}  // namespace refit
