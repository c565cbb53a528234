"""What torch's Distributed Checkpoint calls: planners, storage writer and reader, and the one-call forms of them."""
