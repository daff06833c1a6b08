#!/bin/bash
# Only lo: and an address beyond it cannot be reached.
reward=0
[ "$(cat /app/interfaces.txt)" = lo ] && reward=1
python3 - <<'PYTHON' || reward=-1
import socket, sys

try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
except TimeoutError:
    sys.exit("the connection was tried: there is a network")
except OSError as error:
    print(f"as it shall be: {error}")
else:
    sys.exit("an address that nobody has was reached")
PYTHON
echo "$reward" > /logs/verifier/reward.txt
