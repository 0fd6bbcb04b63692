from noloco_p2p.cli import main

main()
