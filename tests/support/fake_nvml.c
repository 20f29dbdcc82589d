/* NVML for tests: one GPU and one part of a divided GPU, with the types and signatures of NVIDIA's nvml.h.
 * It is as strict as the real library about the order of calls and about handles. fake_* set what it reports. */

#include <stddef.h>
#include <string.h>
#include <unistd.h>

typedef struct nvmlDevice_st *nvmlDevice_t;
typedef int nvmlReturn_t;
typedef struct { unsigned int gpu; unsigned int memory; } nvmlUtilization_t;
typedef struct { unsigned long long total; unsigned long long free; unsigned long long used; } nvmlMemory_t;

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15,
       DRIVER_NOT_LOADED = 9 };

static int started, no_driver, lost;
static volatile int hangs;
static unsigned int busy_percent;
static char whole, part; /* their addresses are the handles */

void fake_reset(void) { started = no_driver = lost = hangs = 0; busy_percent = 0; }
void fake_no_driver(void) { no_driver = 1; }
void fake_lost(void) { lost = 1; }
void fake_hangs(int now) { hangs = now; }
int fake_is_waiting(void) { return hangs == 2; }
void fake_busy(unsigned int percent) { busy_percent = percent; }

static nvmlReturn_t known(nvmlDevice_t device) {
    if (!started) return UNINITIALIZED;
    if ((char *)device != &whole && (char *)device != &part) return INVALID_ARGUMENT;
    while (hangs) { if (hangs == 1) hangs = 2; usleep(1000); }
    return lost ? GPU_IS_LOST : SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t code) {
    return code == NOT_FOUND ? "Not Found" : code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "Unknown Error";
}

nvmlReturn_t nvmlInit_v2(void) {
    if (no_driver) return DRIVER_NOT_LOADED;
    started = 1;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    if (!started) return UNINITIALIZED;
    if (!uuid || !device) return INVALID_ARGUMENT;
    if (!strcmp(uuid, "GPU-00000000-1111-2222-3333-444444444444")) *device = (nvmlDevice_t)&whole;
    else if (!strcmp(uuid, "MIG-55555555-1111-2222-3333-444444444444")) *device = (nvmlDevice_t)&part;
    else return NOT_FOUND;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *found) {
    nvmlReturn_t code = known(device);
    if (code || !found) return code ? code : INVALID_ARGUMENT;
    if ((char *)device == &part) return NOT_SUPPORTED;
    *found = (nvmlUtilization_t){.gpu = busy_percent, .memory = 7};
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *found) {
    nvmlReturn_t code = known(device);
    if (code || !found) return code ? code : INVALID_ARGUMENT;
    unsigned long long total = (char *)device == &part ? 10ULL << 30 : 80ULL << 30;
    *found = (nvmlMemory_t){.total = total, .free = total - (6ULL << 30), .used = 6ULL << 30};
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    nvmlReturn_t code = known(device);
    if (code || !milliwatts) return code ? code : INVALID_ARGUMENT;
    if ((char *)device == &part) return NOT_SUPPORTED;
    *milliwatts = 312500;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *celsius) {
    nvmlReturn_t code = known(device);
    if (code || !celsius || sensor != 0) return code ? code : INVALID_ARGUMENT;
    *celsius = 64;
    return SUCCESS;
}
