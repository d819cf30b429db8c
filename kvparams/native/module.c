/* The module `kvparams.native._native`: what is done for each byte of a request, for the ordinary form of it, and for
 * each block of the prefix index.
 *
 * A function that reads requests returns None for anything out of the ordinary, and the Python code that it stands for
 * does the work then. So this code decides nothing: it must only be right about what is ordinary. */
#include "native.h"

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    FUNCTION(are_within),
    FUNCTION(copy_values),
    FUNCTION(edit_members),
    FUNCTION(fill_line),
    FUNCTION(find_file_values),
    FUNCTION(find_member),
    FUNCTION(find_nodes),
    FUNCTION(find_runs),
    FUNCTION(find_words),
    FUNCTION(gather_pages),
    FUNCTION(get_values),
    FUNCTION(has_form),
    FUNCTION(hash_blocks),
    FUNCTION(link_nodes),
    FUNCTION(member_spans),
    FUNCTION(pack_numbers),
    FUNCTION(put_values),
    FUNCTION(read_chunks),
    FUNCTION(remove_leaves),
    FUNCTION(request_head),
    FUNCTION(response_head),
    FUNCTION(scatter_pages),
    FUNCTION(split_buckets),
    FUNCTION(unlink_nodes),
    FUNCTION(write_object),
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kvparams.native._native", NULL, 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
