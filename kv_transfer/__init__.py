"""The handover of a KV cache from the prefill worker that built it to the decode worker that goes on.

`docs/kv_handover.md` tells the protocol. What runs where:

- prefill engine process: `ShmPool` (the blocks and the fence table), `LeaseTable` (who may read them)
- prefill server process: `KvTransferServicer`
- decode server process: `PeerDirectory` (handshakes, renewals, releases)
- decode engine process: `PeerReaders` (the pools of known peers, read through a `KVReader` each)

Only `shm`, and whoever imports it, imports torch: the server processes stay without.
"""
