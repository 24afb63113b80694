// What a param is to the network. A model family assigns roles; layout
// frontends place params by them; nothing downstream looks at one.
#ifndef REFIT_COMPILER_IR_PARAM_ROLE_H_
#define REFIT_COMPILER_IR_PARAM_ROLE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace refit {

enum class ParamRole : uint8_t {
#define REFIT_ROLE(name, ...) name,
#include "compiler/ir/param_roles.inc"
#undef REFIT_ROLE
};

inline constexpr size_t kRoleCount = 0
#define REFIT_ROLE(...) +1
#include "compiler/ir/param_roles.inc"
#undef REFIT_ROLE
    ;

// What the numbers in the name of a role's params count. kTower: layers, or
// other parts, of the vision tower, which the model's layers do not count; or
// there is no number.
enum class RoleScope : uint8_t { kModel, kLayer, kExpert, kTower };

struct RoleForm {
  std::string_view word;  // "" if no file of rules may use the role
  RoleScope scope;
  int dims;  // of one tensor
  // Checkpoints with block scales hold in fp8: the linear layers of attention,
  // delta nets, MLPs and experts. Never embeddings, heads, norms, routers,
  // biases, b and a of a delta net, Mamba mixers, eh_proj, vision towers.
  bool block_quantized;
  // Frameworks keep params of the role in fp32 whatever a side's dtype, as
  // routers' corrections, because routing compares scores close to each other.
  bool always_fp32;
  // Nothing is known of the module but how it is cut.
  bool plain_module;
  bool of_prediction;  // layers of multi-token prediction alone have it
};

const RoleForm& FormOf(ParamRole role);

// The words of files of rules, in the order of the roles.
std::vector<std::string_view> RoleWords();
// nullopt: there is none of this word.
std::optional<ParamRole> RoleOf(std::string_view word);

inline bool IsPlainModule(ParamRole role) { return FormOf(role).plain_module; }
inline bool IsAlwaysFp32(ParamRole role) { return FormOf(role).always_fp32; }
inline bool IsTower(ParamRole role) {
  return FormOf(role).scope == RoleScope::kTower;
}
inline bool IsBlockQuantized(ParamRole role) {
  return FormOf(role).block_quantized;
}

}  // namespace refit

#endif  // REFIT_COMPILER_IR_PARAM_ROLE_H_
