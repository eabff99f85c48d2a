"""The message plane: small structs between processes, with payloads of numbers.

`Codec` defines the wire format, `Endpoint` sends and receives, `Keys` keep strangers out, and `drive` runs a protocol's
machine on an endpoint and a real clock. See docs/messages.md.
"""

from offbeat.runtime.messages.drive import Driver, Inbox, drive
from offbeat.runtime.messages.endpoint import Endpoint, Incoming, PeerTraffic, named
from offbeat.runtime.messages.frames import Codec, FrameError
from offbeat.runtime.messages.keys import Keys
from offbeat.runtime.messages.sockets import address_in, private_directory

__all__ = [
    "Codec",
    "Driver",
    "Endpoint",
    "FrameError",
    "Inbox",
    "Incoming",
    "Keys",
    "PeerTraffic",
    "address_in",
    "drive",
    "named",
    "private_directory",
]
