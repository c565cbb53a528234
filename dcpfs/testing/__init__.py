"""What dcpfs is tested with, for use on other filesystems and trainers as well.

`conformance` is one suite that any store must pass; `recording` and `faulty` wrap a store to count or to fail;
`servers` starts SeaweedFS and rclone; `scripted_s3` is an S3 server that fails as told.
"""
