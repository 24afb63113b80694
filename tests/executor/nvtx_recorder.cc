// What a profiler is to NVTX: it keeps the texts of all ranges that begin, and
// how many have not ended.
#include <nvtx3/nvToolsExt.h>

#include <cstring>
#include <mutex>
#include <string>

namespace {

std::mutex mutex;
std::string texts;  // one a line
int open_ranges = 0;

int Push(nvtxDomainHandle_t, const nvtxEventAttributes_t* attributes) {
  std::lock_guard lock(mutex);
  texts += std::string(attributes->message.ascii) + "\n";
  return open_ranges++;
}

int Pop(nvtxDomainHandle_t) {
  std::lock_guard lock(mutex);
  return --open_ranges;
}

template <typename Function>
void Set(NvtxFunctionTable table, int id, Function* function) {
  *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" {

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(
      get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) {
    return 0;
  }
  Set(table, NVTX_CBID_CORE2_DomainRangePushEx, Push);
  Set(table, NVTX_CBID_CORE2_DomainRangePop, Pop);
  return 1;
}

// The texts so far, one a line, into `buffer`; returns the open ranges.
int nvtx_recorder_read(char* buffer, size_t size) {
  std::lock_guard lock(mutex);
  std::strncpy(buffer, texts.c_str(), size - 1);
  buffer[size - 1] = '\0';
  return open_ranges;
}
}
