"""One optimizer's state to plain data and back: what it is, which parameter it belongs to, what becomes of it.

``schema``           what a state dict says about itself, in every version
``options``          what a load may do, and what it did
``match``            which saved parameter belongs to which
``hyperparameters``  which settings of the groups come from the checkpoint
``plan``             everything a load will do, decided before anything is changed
``convert``          one parameter's state from any format to any other
``sharded``          the part of a state that lies on one rank
``torch_state``      states that do not say what they are: torch's own
``foreign``          bitsandbytes' states, given torch's keys
``export``           our state for torch's own optimizers
``rebuild``          a whole state dict in another format, without the run it came from

``plan`` and what it uses work on specs, groups and plain data, never on an optimizer; optimizers import them.
"""
