/* A plugin in C.  cc -shared -fPIC -O2 -o libsample.so sample.c */
#include "rollout_plugin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int is(const char *name, const uint8_t *method, size_t len) {
  return strlen(name) == len && memcmp(name, method, len) == 0;
}

static int32_t give(RolloutBuf *out, const void *data, size_t len) {
  out->ptr = malloc(len ? len : 1);
  if (out->ptr == NULL) return 2;
  memcpy(out->ptr, data, len);
  out->len = out->cap = len;
  return ROLLOUT_OK;
}

static int32_t call(const uint8_t *method, size_t method_len, const uint8_t *payload, size_t payload_len,
                    RolloutBuf *out) {
  if (is("echo", method, method_len)) return give(out, payload, payload_len);
  if (is("count", method, method_len)) {
    char text[64];
    int len = snprintf(text, sizeof text, "{\"bytes\": %zu}", payload_len);
    return give(out, text, (size_t)len);
  }
  return ROLLOUT_UNKNOWN_METHOD;
}

static void free_buf(RolloutBuf buf) { free(buf.ptr); }

static RolloutPluginVtable vtable = {ROLLOUT_ABI_VERSION, "sample-cdylib", call, free_buf};

RolloutPluginVtable *rollout_plugin_factory(void) { return &vtable; }
