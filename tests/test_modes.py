"""The paper's decoder in every mode, split and number of ranks equals one process: logits, loss, every gradient."""




WORLDS = [1, 2, 3, 4, 8]
EXACT = ["gather", "halo", "swap"]
PATCH = 4
