"""The terms that a reader of a report may not know, each in a sentence or two."""

from __future__ import annotations

GLOSSARY: tuple[tuple[str, str], ...] = (
    (
        "APRIL",
        "The published attack (Lu et al., CVPR 2022): if block 0 of the model has no norm1 and no "
        "residuals, its gradients give the patch embeddings in closed form. It needs a client "
        "altered in that way.",
    ),
    (
        "MJP",
        "Masked Jigsaw Puzzle (CVPR 2023), the defence asked about: a share γ of a picture's "
        "patches is shuffled among its places, and those places get one common embedding, E_unk.",
    ),
    ("γ", "The share of patches that MJP shuffles and masks, such as .27."),
    (
        "E_unk",
        "The unknown embedding: it stands in place of the position embedding wherever a patch was "
        "shuffled, so that the model is not told where that patch belongs.",
    ),
    (
        "DAL",
        "Dense absolute localization: MJP's extra loss, by which unmasked positions learn to "
        "predict where they are.",
    ),
    (
        "setting (a)",
        "The picture is fed as it is and the reconstruction is compared with it. Nothing is "
        "shuffled, so γ is 0.",
    ),
    (
        "setting (b)",
        "The picture is shuffled by MJP, and the reconstruction is compared with the shuffled "
        "picture that the client fed.",
    ),
    (
        "setting (c)",
        "The picture is shuffled by MJP, and the reconstruction is compared with the original, "
        "unshuffled picture: what an attacker is after.",
    ),
    (
        "upload",
        "What a client sends in one round: the gradient of its loss, or the difference of its "
        "weights. Attacks on several uploads see the same picture under fresh masks.",
    ),
    (
        "worst case",
        "For each picture the best of all attacks that know the client, chosen by comparing with "
        "the private picture: more than any one attacker can count on, and so an upper bound.",
    ),
    (
        "attacker's choice",
        "For each picture the attack whose result explains the upload best (smallest gradient "
        "residual). No private picture is used, so a real attacker can make this choice.",
    ),
    (
        "gradient residual",
        "How much of the uploaded gradient the reconstruction leaves unexplained: the relative "
        "distance between its gradient and the uploaded one. 0 explains all.",
    ),
    (
        "floor",
        "The best score of a picture made without the gradient: a uniform grey, the mean colour "
        "of photographs, another photograph. An attack below it has failed.",
    ),
    (
        "rank ceiling",
        "The PSNR of the true patch embeddings inverted by minimum norm. It bounds attacks that "
        "invert the embedding in that way, as APRIL does, and no others.",
    ),
    (
        "exact",
        "Equal to the compared picture in every value of every pixel after rounding to 8 bits.",
    ),
    (
        "PSNR",
        "Peak signal-to-noise ratio in dB, the higher the closer: at 20 the content is plain to "
        "see, at 30 also its details. Means take min(PSNR, 100).",
    ),
    ("SSIM", "Structural similarity, 1 for equal pictures; standard window and border."),
    ("LPIPS", "Perceptual distance by features of AlexNet; 0 for equal pictures."),
    (
        "FFT2D",
        "The paper's distance of two-dimensional spectra. Its standard variant is the cosine "
        "distance of the pixels.",
    ),
    (
        "cond(A)",
        "Condition number of the linear system that APRIL solves: how much it magnifies rounding.",
    ),
    ("altered block 0", "A block without norm1 and residuals. No client trains such a model."),
)
