"""Add NoLoCo to another trainer with a callback: `huggingface` is for transformers, `lightning` is for Lightning.

    from noloco_p2p.integrations.huggingface import NoLoCoCallback
    trainer = Trainer(..., callbacks=[NoLoCoCallback(peer)])

Import the module for your trainer. This package itself imports neither torch nor any trainer.
"""
