#include "bench/m2n_api.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "bench/window_api.h"

namespace refit {
namespace {

class M2nApiTest : public testing::Test {
 protected:
  M2nApiTest() {
    nccl_.version = 23007;
    nccl_.library = "/nowhere/libnccl.so.2";
  }
  ~M2nApiTest() override { unsetenv("REFIT_NCCL_M2N_LIBRARY"); }

  std::string Error() const { return m2n::Load(nccl_).status().ToString(); }

  nccl::Api nccl_;
};

TEST_F(M2nApiTest, NeedsALaterNccl) {
  nccl_.version = 22809;
  EXPECT_EQ(Error(),
            "UNIMPLEMENTED: nccl_m2n needs NCCL 2.30.5 or later, and "
            "/nowhere/libnccl.so.2 is 2.28.9; REFIT_NCCL_LIBRARY may name "
            "another file");
}

TEST_F(M2nApiTest, SaysWhereItLookedForTheLibrary) {
  setenv("REFIT_NCCL_M2N_LIBRARY", "/nowhere/libnccl_m2n.so", 1);
  EXPECT_EQ(Error(),
            "NOT_FOUND: no libnccl_m2n: none is loaded in this process, and "
            "the file that REFIT_NCCL_M2N_LIBRARY names cannot be: "
            "/nowhere/libnccl_m2n.so: cannot open shared object file: No such "
            "file or directory");
  setenv("REFIT_NCCL_M2N_LIBRARY", "libm.so.6", 1);
  EXPECT_EQ(Error(), "UNIMPLEMENTED: libnccl_m2n has no ncclM2nInit");
}

// It would take a communicator of another library for its own.
TEST_F(M2nApiTest, MustUseTheSameNccl) {
  setenv("REFIT_NCCL_M2N_LIBRARY", FAKE_M2N_LIBRARY, 1);
  EXPECT_EQ(Error(), "FAILED_PRECONDITION: libnccl_m2n uses " FAKE_M2N_LIBRARY
                     ", and this program /nowhere/libnccl.so.2");
  nccl_.library = FAKE_M2N_LIBRARY;
  EXPECT_EQ(Error(), "OK");
}

TEST(WindowApiTest, NeedsALaterNccl) {
  nccl::Api nccl;
  nccl.version = 22809;
  nccl.library = FAKE_NCCL_LIBRARY;
  EXPECT_EQ(nccl::LoadWindowApi(nccl).status().ToString(),
            "UNIMPLEMENTED: windows need NCCL 2.27 or later, "
            "and " FAKE_NCCL_LIBRARY
            " (2.28.9) has no ncclMemAlloc; "
            "REFIT_NCCL_LIBRARY may name another file");
}

}  // namespace
}  // namespace refit
