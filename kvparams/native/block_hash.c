/* Block hashes of token ids; see kvparams/index/block_hashes.py. */
#include "native.h"

typedef struct {
    const uint64_t *weights, *positions;
    uint64_t namespace, hash;
    Py_ssize_t block_size, blocks;
    uint64_t *to;
} Hasher;

static uint64_t mix(uint64_t word) {
    word = (word ^ word >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    word = (word ^ word >> 27) * UINT64_C(0x94D049BB133111EB);
    return word ^ word >> 31;
}

static void end_block(Hasher *hasher, Py_ssize_t block, uint64_t sum) {
    hasher->hash += mix(hasher->namespace + hasher->positions[block] + sum);
    hasher->to[block] = hasher->hash;
}

static void hash_array(Hasher *hasher, const uint32_t *ids) {
    for (Py_ssize_t block = 0; block < hasher->blocks; block++, ids += hasher->block_size) {
        uint64_t sum = 0;
        for (Py_ssize_t i = 0; i < hasher->block_size; i++)
            sum += hasher->weights[i] * ids[i];
        end_block(hasher, block, sum);
    }
}

/* Returns -1, without an exception, for an item that is no `int` from 0 to 2^32 - 1. */
static inline int64_t token_at(PyObject *list, Py_ssize_t at) {
    int64_t id = PyLong_AsSsize_t(PyList_GetItem(list, at));
    if (id >= 0 && id <= UINT32_MAX)
        return id;
    PyErr_Clear();
    return -1;
}

static bool hash_list(Hasher *hasher, PyObject *list) {
    const uint64_t *weights = hasher->weights;
    const Py_ssize_t block_size = hasher->block_size;
    Py_ssize_t at = 0, size = PyList_Size(list);
    for (Py_ssize_t block = 0; block < hasher->blocks; block++) {
        uint64_t sum = 0;
        for (Py_ssize_t i = 0; i < block_size; i++) {
            int64_t id = token_at(list, at++);
            if (id < 0)
                return false;
            sum += weights[i] * (uint64_t)id;
        }
        end_block(hasher, block, sum);
    }
    while (at < size)
        if (token_at(list, at++) < 0)
            return false;
    return true;
}

static bool hash_tokens(Hasher *hasher, PyObject *tokens) {
    Words ids;
    if (PyList_CheckExact(tokens))
        return hash_list(hasher, tokens);
    if (!get_words(tokens, 4, false, &ids))
        return false;
    bool enough = ids.count / hasher->block_size >= hasher->blocks;
    if (enough)
        hash_array(hasher, ids.view.buf);
    PyBuffer_Release(&ids.view);
    return enough;
}

/* hash_blocks(tokens, weights, positions, namespace, parent, hashes) -> bool */
PyObject *hash_blocks(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Words words[3];
    int held = 0;
    bool done = false;
    (void)module;
    if (!has_arguments(count, 6))
        return NULL;
    Hasher hasher = {.namespace = PyLong_AsUnsignedLongLong(args[3]), .hash = PyLong_AsUnsignedLongLong(args[4])};
    if (PyErr_Occurred())
        return NULL;
    PyObject *const arrays[] = {args[1], args[2], args[5]};
    while (held < 3 && get_words(arrays[held], 8, held == 2, &words[held]))
        held++;
    if (held == 3) {
        hasher.weights = words[0].view.buf;
        hasher.block_size = words[0].count;
        hasher.positions = words[1].view.buf;
        hasher.to = words[2].view.buf;
        hasher.blocks = words[2].count;
        done = hasher.block_size > 0 && hasher.blocks <= words[1].count && hash_tokens(&hasher, args[0]);
    }
    while (held > 0)
        PyBuffer_Release(&words[--held].view);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(done);
}
