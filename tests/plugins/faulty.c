/* A library with every fault; -DABI=2 for another ABI, -DNULL_TABLE for none. */
#include "rollout_plugin.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef ABI
#define ABI ROLLOUT_ABI_VERSION
#endif
#ifndef NAME
#define NAME "faulty-cdylib"
#endif

static int freed;

static int is(const char *name, const uint8_t *method, size_t len) {
  return strlen(name) == len && memcmp(name, method, len) == 0;
}

static int32_t give(RolloutBuf *out, const char *text, size_t len, int32_t code) {
  out->ptr = malloc(len + 1);
  memcpy(out->ptr, text, len);
  out->len = len;
  out->cap = len + 1;
  return code;
}

static int32_t call(const uint8_t *method, size_t method_len, const uint8_t *payload, size_t payload_len,
                    RolloutBuf *out) {
  if (is("crash", method, method_len)) *(volatile int *)0 = 1;
  if (is("hang", method, method_len)) for (;;) sleep(1);
  if (is("huge", method, method_len)) {
    out->ptr = malloc(1);
    out->len = (size_t)1 << 40;
    return 0;
  }
  if (is("null", method, method_len)) {
    out->len = 10;
    return 0;
  }
  if (is("fails", method, method_len)) return give(out, "out of luck", 11, 7);
  if (is("text", method, method_len)) return give(out, "not json", 8, 0);
  if (is("empty", method, method_len)) return 0;
  if (is("freed", method, method_len)) {
    char digit = (char)('0' + freed);
    return give(out, &digit, 1, 0);
  }
  (void)payload;
  (void)payload_len;
  return ROLLOUT_UNKNOWN_METHOD;
}

static void free_buf(RolloutBuf buf) {
  memset(buf.ptr, 'X', buf.len < 64 && buf.cap ? buf.len : 0); /* who did not copy sees it */
  free(buf.ptr);
  freed++;
}

static RolloutPluginVtable vtable = {ABI, NAME, call, free_buf};

RolloutPluginVtable *rollout_plugin_factory(void) {
#ifdef NULL_TABLE
  return NULL;
#else
  return &vtable;
#endif
}
