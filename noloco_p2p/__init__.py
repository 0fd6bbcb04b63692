"""noloco_p2p: train one model together over the internet, without a data centre, a master or an all-reduce."""
