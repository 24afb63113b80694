#include "refit/host_device.h"

#include "tests/executor/device_conformance.h"

namespace refit {
namespace {

INSTANTIATE_TEST_SUITE_P(Host, DeviceConformance,
                         testing::Values(DeviceFactory([] {
                           return std::make_unique<HostDevice>();
                         })));

}  // namespace
}  // namespace refit
