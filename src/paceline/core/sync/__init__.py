"""The sync model in a run: at each shard, at the coordinator, and in calls that all workers make together."""
