/* A libnvidia-ml that does what a text file says, for drills with a real dlopen, real hangs and real crashes.
 *
 * $FAKE_NVML names the file. Its lines: "cards 2", "free 1000", "ecc 3", "pids 0 17,18" (card 0), and
 * "FUNCTION hang|crash|CODE" or "FUNCTION@INDEX CODE" for one card. It is read at every call. Events are
 * appended to $FAKE_NVML.events, one "INDEX TYPE DATA" a line; those from before nvmlInit are not told. A
 * call that hangs makes the file $FAKE_NVML.hangs. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ARGUMENT_VERSION_MISMATCH 25
#define GIB (1ull << 30)
typedef unsigned long long ull;

static long told_to;
static int open_count;
static char handles[16];

static int find(const char *key, char *value, size_t size) {
    char line[512], name[256];
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    int found = 0, end = 0;
    while (file && !found && fgets(line, sizeof line, file))
        if (sscanf(line, "%255s %n", name, &end) == 1 && !strcmp(name, key)) {
            snprintf(value, size, "%s", line + end);
            found = 1;
        }
    if (file) fclose(file);
    return found;
}

static ull number(const char *key, ull otherwise) {
    char value[256];
    return find(key, value, sizeof value) ? strtoull(value, NULL, 10) : otherwise;
}

static int fault(const char *function, int index) {
    char value[256], key[256];
    snprintf(key, sizeof key, "%s@%d", function, index);
    while (find(function, value, sizeof value) && !strncmp(value, "hang", 4)) {
        FILE *told;
        snprintf(key, sizeof key, "%s.hangs", getenv("FAKE_NVML"));
        if ((told = fopen(key, "a"))) fclose(told);
        usleep(10000);
    }
    if (find(function, value, sizeof value)) {
        if (!strncmp(value, "crash", 5)) raise(SIGSEGV);
        return atoi(value);
    }
    return (int)number(key, open_count || !strncmp(function, "nvmlInit", 8) ? 0 : 1);
}

static int index_of(void *handle) { return (int)((char *)handle - handles); }
#define CHECK(index) do { int code = fault(__func__, index); if (code) return code; } while (0)

const char *nvmlErrorString(int code) { (void)code; return "as the drill says"; }
int nvmlInitWithFlags(unsigned flags) {
    char path[512];
    FILE *file;
    (void)flags;
    CHECK(-1);
    open_count++;
    snprintf(path, sizeof path, "%s.events", getenv("FAKE_NVML"));
    if ((file = fopen(path, "r"))) { fseek(file, 0, SEEK_END); told_to = ftell(file); fclose(file); }
    else told_to = 0;
    return 0;
}
int nvmlShutdown(void) { CHECK(-1); open_count--; return 0; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { CHECK(-1); snprintf(out, size, "580.95.05"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { CHECK(-1); *out = (unsigned)number("cards", 1); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    CHECK((int)index);
    *out = &handles[index];
    return 0;
}
int nvmlDeviceGetUUID(void *card, char *out, unsigned size) {
    CHECK(index_of(card));
    snprintf(out, size, "GPU-0000000%d-drill", index_of(card));
    return 0;
}
int nvmlDeviceGetName(void *card, char *out, unsigned size) {
    CHECK(index_of(card));
    snprintf(out, size, "NVIDIA H200");
    return 0;
}
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(void *card, struct pci *out) {
    CHECK(index_of(card));
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", index_of(card) + 1);
    return 0;
}
struct memory { ull total, free, used; };
int nvmlDeviceGetMemoryInfo(void *card, struct memory *out) {
    CHECK(index_of(card));
    out->total = 140 * GIB;
    out->free = number("free", 100 * GIB);
    out->used = out->total - out->free;
    return 0;
}
struct memory_v2 { unsigned version; ull total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *card, struct memory_v2 *out) {
    CHECK(index_of(card));
    if (out->version != (2u << 24 | sizeof *out)) return ARGUMENT_VERSION_MISMATCH;
    out->total = 140 * GIB;
    out->free = number("free", 100 * GIB);
    out->reserved = GIB;
    out->used = out->total - out->free - out->reserved;
    return 0;
}
int nvmlDeviceGetMigMode(void *card, unsigned *current, unsigned *pending) {
    CHECK(index_of(card));
    *current = *pending = 0;
    return 0;
}
int nvmlDeviceGetTemperature(void *card, unsigned sensor, unsigned *out) {
    (void)sensor;
    CHECK(index_of(card));
    *out = (unsigned)number("temperature", 40);
    return 0;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *card, ull *out) {
    CHECK(index_of(card));
    *out = number("clocks", 0);
    return 0;
}
int nvmlDeviceGetTotalEccErrors(void *card, unsigned kind, unsigned span, ull *out) {
    (void)kind, (void)span;
    CHECK(index_of(card));
    *out = number("ecc", 0);
    return 0;
}
struct process { unsigned pid; ull used; unsigned gpu_instance, compute_instance; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *card, unsigned *count, struct process *out) {
    char key[32], value[256], *rest, *word;
    unsigned pids[16], found = 0, room = *count;
    CHECK(index_of(card));
    snprintf(key, sizeof key, "pids%d", index_of(card));
    if (find(key, value, sizeof value))
        for (word = strtok_r(value, ",\n", &rest); word && found < 16; word = strtok_r(NULL, ",\n", &rest))
            pids[found++] = (unsigned)atoi(word);
    *count = found;
    if (found > room || (found && !out)) return 7; /* insufficient size */
    for (unsigned i = 0; i < found; i++) out[i] = (struct process){pids[i], GIB, ~0u, ~0u};
    return 0;
}
int nvmlEventSetCreate(void **out) { CHECK(-1); *out = handles; return 0; }
int nvmlEventSetFree(void *set) { (void)set; CHECK(-1); return 0; }
int nvmlDeviceGetSupportedEventTypes(void *card, ull *out) { CHECK(index_of(card)); *out = 0xffff; return 0; }
int nvmlDeviceRegisterEvents(void *card, ull types, void *set) {
    (void)types, (void)set;
    CHECK(index_of(card));
    return 0;
}
struct event { void *card; ull type, data; unsigned gpu_instance, compute_instance; };
int nvmlEventSetWait_v2(void *set, struct event *out, unsigned timeout_ms) {
    char path[512];
    (void)set;
    snprintf(path, sizeof path, "%s.events", getenv("FAKE_NVML"));
    for (unsigned waited = 0;; waited += 5) {
        unsigned index;
        int got = 0;
        FILE *file;
        CHECK(-1);
        if ((file = fopen(path, "r"))) {
            fseek(file, told_to, SEEK_SET);
            got = fscanf(file, "%u %llu %llu\n", &index, &out->type, &out->data) == 3;
            if (got) told_to = ftell(file);
            fclose(file);
        }
        if (got) {
            out->card = &handles[index];
            out->gpu_instance = out->compute_instance = ~0u;
            return 0;
        }
        if (waited >= timeout_ms) return 10; /* timeout */
        usleep(5000);
    }
}
