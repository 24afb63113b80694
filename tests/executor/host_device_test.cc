#include "refit/host_device.h"

#include "tests/executor/device_conformance.h"
#include "tests/executor/quantise_conformance.h"

namespace refit {
namespace {

INSTANTIATE_TEST_SUITE_P(Host, QuantiseConformance,
                         testing::Values(DeviceFactory([] {
                           return std::make_unique<HostDevice>();
                         })));
INSTANTIATE_TEST_SUITE_P(Host, DeviceConformance,
                         testing::Values(DeviceFactory([] {
                           return std::make_unique<HostDevice>();
                         })));

}  // namespace
}  // namespace refit
