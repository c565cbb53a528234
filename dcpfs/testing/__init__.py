"""What dcpfs is tested with, for use on other filesystems and trainers as well.

`conformance` is one suite that any store must pass; `recording` and `faulty` wrap a store to count or to fail;
`servers` starts SeaweedFS and rclone, which can be killed and started again; `scripted_s3` is an S3 server that fails
as told, with the faults of `s3_faults`; `tcp_proxy` is a network that breaks at a chosen request and byte, and heals.

::

    with ScriptedS3Server() as server, TcpProxy(server.port) as network:
        options = {**server.storage_options, "endpoint_url": f"http://127.0.0.1:{network.port}"}
        server.fail("UploadPart", slow_down(), times=2)
        point = network.cut_at(Cut.RESET, pattern=b"partNumber=2", after_bytes=1 << 20, mends_after=1)
        dcpfs.save(state, server.url("run"), storage_options=options)
        assert point.reached.is_set()
        assert len(server.requests("UploadPart")) > 2
        assert server.open_uploads() == []
"""
