// The names of libnccl_m2n, and of the NCCL that it would bring.
int ncclM2nInit(void) { return 0; }
int ncclM2nFinalize(void) { return 0; }
const char* ncclM2nGetLastError(void) { return ""; }
int ncclM2nGroupStart(void) { return 0; }
int ncclM2nGroupEnd(void) { return 0; }
int ncclReshard(void) { return 0; }
int ncclGetVersion(int* version) {
  *version = 23007;
  return 0;
}
