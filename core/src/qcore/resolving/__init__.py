"""From a request to a kernel: offers, verification, timing, the decision and its explanation, binding to a weight.

May import: discovery, contracts and every package below. Imported by: functional, nn, model, parallel, checkpoint,
hf, cli, testing, plugin_api, `qcore`.
"""
