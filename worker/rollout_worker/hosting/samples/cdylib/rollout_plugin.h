/* C ABI of Rollout plugins, version 1.

   A library exports rollout_plugin_factory(), which returns a table that lives as long as the library. The host calls
   `call` from one thread, one call at a time, copies `out`, and then gives it back through `free_buf`. Method and
   payload are not terminated by a zero byte. Payloads are UTF-8 JSON unless the caller passes bytes.

   `call` returns ROLLOUT_OK, ROLLOUT_UNKNOWN_METHOD, or any other code for a failure; with a failure `out` may hold a
   message. `free_buf` is called whenever `out->ptr` is not NULL. */
#ifndef ROLLOUT_PLUGIN_H
#define ROLLOUT_PLUGIN_H

#include <stddef.h>
#include <stdint.h>

#define ROLLOUT_ABI_VERSION 1u
#define ROLLOUT_OK 0
#define ROLLOUT_UNKNOWN_METHOD 1

typedef struct {
  uint8_t *ptr;
  size_t len;
  size_t cap;
} RolloutBuf;

typedef struct {
  uint32_t abi_version; /* must equal ROLLOUT_ABI_VERSION */
  const char *name;     /* must equal the manifest's name */
  int32_t (*call)(const uint8_t *method, size_t method_len, const uint8_t *payload, size_t payload_len,
                  RolloutBuf *out);
  void (*free_buf)(RolloutBuf buf);
} RolloutPluginVtable;

RolloutPluginVtable *rollout_plugin_factory(void);

#endif
