"""The handover of a KV cache from the prefill worker that built it to the decode worker that goes on.

`docs/kv_handover.md` tells the protocol. What runs where:

- prefill engine process: `SourcePool` (the blocks, the fence table, what sends them), `LeaseTable` (who may read them)
- prefill server process: `KvTransferServicer`, `BlockStream` (the blocks over gRPC)
- decode server process: `PeerDirectory` (handshakes, renewals, releases)
- decode engine process: `PeerReaders` (the pools of known peers, read through a `KVReader` each)

What runs in a server process imports no torch.
"""
