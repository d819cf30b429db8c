/* Removes leaves of the block tree; see kvparams/index/leaf_removal.py. */
#include "native.h"

static const uint32_t FREED = UINT32_MAX;

/* Numbers that are found one by one. */
typedef struct {
    uint32_t *at;
    size_t count, room;
} Numbers;

typedef struct {
    Words views[5];
    int view_count;
    uint32_t *parents, *children, *sets, *epochs, nodes;
    uint8_t *is_queued;
    uint64_t epoch, most;
    Numbers removed, queued;
} Removal;

static bool append(Numbers *numbers, uint32_t number) {
    if (numbers->count == numbers->room) {
        size_t room = numbers->room == 0 ? 1024 : 2 * numbers->room;
        uint32_t *at = PyMem_Realloc(numbers->at, room * sizeof *at);
        if (at == NULL)
            return false;
        numbers->at = at;
        numbers->room = room;
    }
    numbers->at[numbers->count++] = number;
    return true;
}

static PyObject *packed(const Numbers *numbers) {
    return PyBytes_FromStringAndSize((const char *)numbers->at, (Py_ssize_t)(numbers->count * sizeof *numbers->at));
}

/* Reads the `NodeLinks`. Returns false with an exception set; the caller closes the removal in any case. */
static bool open_removal(Removal *removal, PyObject *links) {
    if (!PyTuple_Check(links) || PyTuple_Size(links) != 5) {
        PyErr_SetString(PyExc_TypeError, "the links of a tree are five arrays");
        return false;
    }
    for (; removal->view_count < 5; removal->view_count++) {
        int i = removal->view_count;
        if (!get_words(PyTuple_GetItem(links, i), i == 4 ? 1 : 4, true, &removal->views[i]))
            return false;
        if (removal->views[i].count != removal->views[0].count || removal->views[i].count >= UINT32_MAX) {
            PyErr_SetString(PyExc_ValueError, "the arrays of a tree have different lengths");
            PyBuffer_Release(&removal->views[i].view);
            return false;
        }
    }
    removal->nodes = (uint32_t)removal->views[0].count;
    removal->parents = removal->views[0].view.buf;
    removal->children = removal->views[1].view.buf;
    removal->sets = removal->views[2].view.buf;
    removal->epochs = removal->views[3].view.buf;
    removal->is_queued = removal->views[4].view.buf;
    return true;
}

static void close_removal(Removal *removal) {
    while (removal->view_count > 0)
        PyBuffer_Release(&removal->views[--removal->view_count].view);
    PyMem_Free(removal->removed.at);
    PyMem_Free(removal->queued.at);
}

/* Sets `top` to the ancestor that has become a leaf and stays, or to 0. */
static bool climb(Removal *removal, uint32_t number, uint32_t *top) {
    *top = 0;
    for (;;) {
        if (!append(&removal->removed, number))
            return false;
        removal->children[number] = FREED;
        number = removal->parents[number];
        if (number == 0 || number >= removal->nodes || --removal->children[number] != 0)
            return true;
        bool is_held = removal->sets[number] != 0;
        if (is_held && (removal->epochs[number] > removal->epoch || removal->removed.count >= removal->most)) {
            *top = number;
            return true;
        }
    }
}

static bool remove_one(Removal *removal, uint32_t number) {
    uint32_t top = number;
    if (number == 0 || number >= removal->nodes)
        return true;
    if (removal->epoch != 0)
        removal->is_queued[number] = 0;
    if (removal->children[number] != 0)
        return true;
    if ((removal->epoch == 0 || removal->epochs[number] <= removal->epoch) && !climb(removal, number, &top))
        return false;
    if (top == 0 || removal->is_queued[top])
        return true;
    removal->is_queued[top] = 1;
    return append(&removal->queued, top);
}

/* remove_leaves(links, candidates, epoch, most) -> (left, removed, queued) */
PyObject *remove_leaves(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    Removal removal = {.view_count = 0};
    Words candidates;
    PyObject *found = NULL;
    (void)module;
    if (!has_arguments(count, 4))
        return NULL;
    removal.epoch = PyLong_AsUnsignedLongLong(args[2]);
    removal.most = PyLong_AsUnsignedLongLong(args[3]);
    if (!PyErr_Occurred() && open_removal(&removal, args[0]) && get_words(args[1], 4, false, &candidates)) {
        const uint32_t *numbers = candidates.view.buf;
        Py_ssize_t left = candidates.count;
        while (left > 0 && removal.removed.count < removal.most)
            if (!remove_one(&removal, numbers[--left])) {
                PyErr_NoMemory();
                break;
            }
        PyBuffer_Release(&candidates.view);
        if (!PyErr_Occurred())
            found = Py_BuildValue("nNN", left, packed(&removal.removed), packed(&removal.queued));
    }
    close_removal(&removal);
    return found;
}
