#include "simulator/link_shares.h"

#include <gtest/gtest.h>

namespace refit::simulator {
namespace {

TEST(LinkSharesTest, ABinHasTheMeanOfItsTime) {
  Simulation simulation;
  simulation.seconds = 8;
  simulation.graph.links.resize(2);
  simulation.rates = {{.seconds = 1, .link = 0, .share = 1.0F},
                      {.seconds = 4, .link = 0, .share = 0.5F},
                      {.seconds = 7, .link = 0, .share = 0}};
  const LinkShares shares(simulation, 4);
  EXPECT_EQ(shares[0], (std::vector<double>{0.5, 1, 0.5, 0.25}));
  EXPECT_EQ(shares[1], (std::vector<double>{0, 0, 0, 0}));
}

TEST(LinkSharesTest, ARefitOfNoTimeHasNoShares) {
  Simulation simulation;
  simulation.graph.links.resize(1);
  EXPECT_EQ(LinkShares(simulation, 2)[0], (std::vector<double>{0, 0}));
}

}  // namespace
}  // namespace refit::simulator
