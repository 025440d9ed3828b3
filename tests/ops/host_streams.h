/* Streams of ranks on one device whose kernels would wait for each other (mm_cu_separate_streams). Part of host.c. */
#ifndef MM_TESTS_HOST_STREAMS_H
#define MM_TESTS_HOST_STREAMS_H

enum { GIVEN_UP_AT = 10, LATE_AT = 11 }; /* words of a peer_control (peers.cuh) */

static uint32_t late_tries; /* in which the kernel of rank 1 begins late */
static void begin_late(const char *name, void **args) {
  if (!strstr(name, "await_streams")) return;
  volatile uint32_t *const c = *(volatile uint32_t **)args[0];
  const uint32_t rank = *(uint32_t *)args[1], number = *(uint32_t *)args[3];
  if (number <= late_tries) c[GIVEN_UP_AT] = number;
  c[LATE_AT + rank] = number <= late_tries && rank == 1;
}

static uint32_t open_streams(void) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < STREAMS; i++) n += fake.stream[i].open;
  return n;
}

/* A rank that gets no other stream fails, and closes its own once. */
static void check_no_stream(const mm_shards *two) {
  mm_err err = {0};
  mm_engine *e = open_engine(two);
  late_tries = 3, fake.no_streams = true;
  report("streams of ranks on one device, where no other is made", e && !step(e, 1, false, &err), err.text);
  fake.no_streams = false;
  close_engine(e, "its calls and its memory");
  report("streams are closed once", !fake.twice && open_streams() == 0, "one was closed twice, or not");
}

/* A rank's device is not there, as a variable of the environment may hide it. */
static void check_hidden(const mm_shards *two) {
  setenv("CUDA_VISIBLE_DEVICES", "0,1", 1);
  check_refused(two, "a device that is not there", "E_DEVICE",
                "device 7; found 2 (--devices names one for each rank); CUDA_VISIBLE_DEVICES");
  unsetenv("CUDA_VISIBLE_DEVICES");
}

/* Variables of the environment with which kernels of ranks on one device do not run at the same time. */
static void check_variables(const mm_shards *two) {
  static const char *const set[][2] = {{"CUDA_LAUNCH_BLOCKING", "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS", "1"}};
  for (size_t i = 0; i < sizeof set / sizeof *set; i++) {
    char text[64];
    snprintf(text, sizeof text, "%s is \"%s\"", set[i][0], set[i][1]);
    setenv(set[i][0], set[i][1], 1);
    check_refused(two, "a variable that keeps kernels from running at the same time", "E_DEVICE", text);
    unsetenv(set[i][0]);
  }
}

/* The rank that is late has another stream for each try, and keeps those before until it closes; after too many it says so. */
static void check_streams(const mm_shards *two) {
  placed_on[1] = 0, fake.on_launch = begin_late;
  for (late_tries = 0; late_tries < 1000; late_tries = late_tries ? 1000 : 3) {
    mm_err err = {0};
    mm_engine *e = open_engine(two);
    if (!e) return;
    const bool ok = step(e, 1, false, &err);
    const uint32_t streams = open_streams();
    char text[300];
    snprintf(text, sizeof text, "%u streams, %.250s", streams, err.text);
    report("streams of ranks on one device", ok && streams == 2 + late_tries, text);
    close_engine(e, "its calls and its memory");
  }
  mm_engine *e = open_engine(two);
  for (int i = 0; i < 2; i++) {
    mm_err err = {0};
    const bool refused =
        e && !step(e, 1, false, &err) && strcmp(err.code, "E_DEVICE") == 0 && strstr(err.text, "do not run at the same time");
    report(i ? "the next step tries as many again" : "streams of ranks on one device that all have one queue", refused, err.text);
    report("streams that were tried are closed", open_streams() <= 2, "some are left");
  }
  mm_err err = {0};
  late_tries = 0;
  report("a step after those runs where its kernels do", e && step(e, 1, false, &err), err.text);
  close_engine(e, "its calls and its memory");
  report("streams are closed", open_streams() == 0, "some are left");
  check_no_stream(two);
  check_variables(two);
  placed_on[1] = 1, fake.on_launch = NULL;
}

#endif
