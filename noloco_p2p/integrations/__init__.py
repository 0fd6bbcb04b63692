"""Callbacks that add NoLoCo to other trainers: `huggingface` for transformers, `lightning` for Lightning.

    from noloco_p2p.integrations.huggingface import NoLoCoCallback Trainer(..., callbacks=[NoLoCoCallback(peer)])

Import the module of your trainer: this package itself imports neither torch nor any trainer.
"""
