// Vision towers: names, shapes and roles of what reads images.
#ifndef REFIT_COMPILER_MODEL_TOWER_H_
#define REFIT_COMPILER_MODEL_TOWER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/ir/module.h"
#include "compiler/model/config.h"
#include "compiler/model/model.h"

namespace refit {

// Sets the number of the tower's attention heads, which `key` has. They divide
// `hidden`, its "hidden_size".
void ReadTowerHeads(std::string_view key, int64_t hidden, ConfigReader& vision,
                    Model& model);

// Reports a dtype that the tower alone has. Where the model has one, this is
// the tower's too: frameworks do not heed the tower's own.
void CheckTowerDType(ConfigReader& vision, ConfigReader& text);

// Adds the stacks of a tower in the order of the calls.
class TowerBuilder {
 public:
  // `root`: what the names begin with, "model.visual.". `vision` has the
  // tower's keys, `text` the model's dtype.
  TowerBuilder(ConfigReader& vision, ConfigReader& text, Model& model,
               std::string root);

  // `index` empty: there is one of it.
  using Index = std::vector<IndexDim>;

  void Add(std::string_view name, ParamRole role, Dims shape,
           const Index& index = {});
  // "<name>.weight" [out, in], and "<name>.bias". The bias of a kTowerRow is
  // whole.
  void AddLinear(std::string_view name, ParamRole role, int64_t out, int64_t in,
                 const Index& index = {}, bool bias = true);
  // A layer norm with weight and bias.
  void AddNorm(std::string_view name, int64_t size, const Index& index = {});

 private:
  ConfigReader& vision_;
  Model& model_;
  const std::string root_;
  const DType dtype_;
};

}  // namespace refit

#endif  // REFIT_COMPILER_MODEL_TOWER_H_
