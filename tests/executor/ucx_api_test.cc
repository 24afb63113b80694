// That what Refit declares of UCX lies in memory as UCX's own header has it.
#include "executor/transport/ucx_api.h"

#include <gtest/gtest.h>
#include <ucp/api/ucp.h>

#include <type_traits>

namespace refit::ucx {
namespace {

static_assert(sizeof(Status) == sizeof(ucs_status_t));
static_assert(kFeatureTag == UCP_FEATURE_TAG);
static_assert(kFeatureWakeup == UCP_FEATURE_WAKEUP);

static_assert(ContextParams::kFeatures == UCP_PARAM_FIELD_FEATURES);
static_assert(ContextParams::kEstimatedEndpoints ==
              UCP_PARAM_FIELD_ESTIMATED_NUM_EPS);
static_assert(offsetof(ContextParams, features) ==
              offsetof(ucp_params_t, features));
static_assert(offsetof(ContextParams, estimated_endpoints) ==
              offsetof(ucp_params_t, estimated_num_eps));

static_assert(WorkerParams::kThreadMode == UCP_WORKER_PARAM_FIELD_THREAD_MODE);
static_assert(kThreadSerialized ==
              static_cast<int>(UCS_THREAD_MODE_SERIALIZED));
static_assert(offsetof(WorkerParams, thread_mode) ==
              offsetof(ucp_worker_params_t, thread_mode));
static_assert(sizeof(WorkerParams) >= sizeof(ucp_worker_params_t));

static_assert(EndpointParams::kRemoteAddress ==
              UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
static_assert(offsetof(EndpointParams, address) ==
              offsetof(ucp_ep_params_t, address));
static_assert(EndpointParams::kErrorMode ==
              UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
static_assert(EndpointParams::kErrorHandler == UCP_EP_PARAM_FIELD_ERR_HANDLER);
static_assert(kErrorModePeer == static_cast<int>(UCP_ERR_HANDLING_MODE_PEER));
static_assert(offsetof(EndpointParams, error_mode) ==
              offsetof(ucp_ep_params_t, err_mode));
static_assert(offsetof(EndpointParams, error_handler) ==
              offsetof(ucp_ep_params_t, err_handler.cb));
static_assert(offsetof(EndpointParams, error_argument) ==
              offsetof(ucp_ep_params_t, err_handler.arg));
static_assert(sizeof(EndpointParams) >= sizeof(ucp_ep_params_t));

static_assert(sizeof(ReceiveInfo) == sizeof(ucp_tag_recv_info_t));
static_assert(offsetof(ReceiveInfo, length) ==
              offsetof(ucp_tag_recv_info_t, length));

static_assert(RequestParam::kCallback == UCP_OP_ATTR_FIELD_CALLBACK);
static_assert(RequestParam::kUserData == UCP_OP_ATTR_FIELD_USER_DATA);
static_assert(RequestParam::kFlags == UCP_OP_ATTR_FIELD_FLAGS);
static_assert(kForceClose == UCP_EP_CLOSE_FLAG_FORCE);
static_assert(offsetof(RequestParam, flags) ==
              offsetof(ucp_request_param_t, flags));
static_assert(RequestParam::kMemoryType == UCP_OP_ATTR_FIELD_MEMORY_TYPE);
static_assert(RequestParam::kNoImmediateCompletion ==
              UCP_OP_ATTR_FLAG_NO_IMM_CMPL);
static_assert(UCS_MEMORY_TYPE_HOST == 0);
static_assert(offsetof(RequestParam, attributes) ==
              offsetof(ucp_request_param_t, op_attr_mask));
static_assert(offsetof(RequestParam, callback) ==
              offsetof(ucp_request_param_t, cb));
static_assert(offsetof(RequestParam, user_data) ==
              offsetof(ucp_request_param_t, user_data));
static_assert(offsetof(RequestParam, memory_type) ==
              offsetof(ucp_request_param_t, memory_type));
static_assert(sizeof(RequestParam) >= sizeof(ucp_request_param_t));

TEST(UcxApiTest, StatusesInTheGuiseOfAddressesAreToldFromRequests) {
  int request = 0;
  const StatusPointer errors[] = {UCS_STATUS_PTR(UCS_ERR_MESSAGE_TRUNCATED),
                                  UCS_STATUS_PTR(UCS_ERR_LAST),
                                  UCS_STATUS_PTR(UCS_ERR_NO_MESSAGE)};
  for (const StatusPointer error : errors) {
    EXPECT_FALSE(IsRequest(error));
    EXPECT_EQ(StatusOfPointer(error),
              static_cast<Status>(UCS_PTR_STATUS(error)));
  }
  EXPECT_FALSE(IsRequest(nullptr));
  EXPECT_EQ(StatusOfPointer(nullptr), kOk);
  EXPECT_TRUE(IsRequest(&request));
  EXPECT_EQ(StatusOfPointer(&request), kInProgress);
}

TEST(UcxApiTest, LibraryIsLoadedWithItsVersion) {
  const absl::StatusOr<Api> api = Load();
  ASSERT_TRUE(api.ok()) << api.status();
  EXPECT_GE(api->version, 1012000);
  EXPECT_NE(api->library.find("libucp.so"), std::string::npos);
  EXPECT_EQ(StatusOf(*api, kMessageTruncated, "a call").message(),
            "a call: UCX error -9, Message truncated");
}

TEST(UcxApiTest, StatusesHaveUcxsNumbers) {
  EXPECT_EQ(int{kInProgress}, int{UCS_INPROGRESS});
  EXPECT_EQ(int{kMessageTruncated}, int{UCS_ERR_MESSAGE_TRUNCATED});
  EXPECT_EQ(int{kBusy}, int{UCS_ERR_BUSY});
}

TEST(UcxApiTest, VersionsAreTold) {
  EXPECT_EQ(VersionText(1013001), "1.13.1");
  EXPECT_EQ(VersionText(1020000), "1.20.0");
}

}  // namespace
}  // namespace refit::ucx
