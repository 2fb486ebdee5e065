"""Training ViTs with and without MJP, and measuring the trained models as the paper does.

`trainer` is the way in: it finds images and makes `batches` of them, and repeats the steps of a
`learner`. `evaluation` measures models. The paper's other tables are in `mjp_privacy/paper`.
"""
