"""An engine's process that dies while it loads, and needs a moment to say of what."""

import socket
import sys
import time

socket.socket(fileno=int(sys.argv[1])).close()
time.sleep(0.3)
sys.exit("no memory left")
