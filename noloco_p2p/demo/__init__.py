"""The main job in small: real peers as real processes on loopback, watched until they are done, then evaluated."""
