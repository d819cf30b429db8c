/* Looks keys up in the index of a `file` store; see kvparams_connectors/stores/file/index.py and file_map.py.
 *
 * The index is memory that other processes change meanwhile, so nothing in it is trusted: a slot is looked at between two
 * equal readings of its word, and every number is compared with the size of its memory. */
#include "native.h"
#define XXH_INLINE_ALL
#include "vendor/xxhash.h"

enum { WAYS = 8, RECORD = 256, KEY = 128, CHECKED = RECORD - 4, STATE = 3, READY = 2 };
enum { GENERATION_AT = 128, NBYTES_AT = 136, RUNS_AT = 156, RUN_AT = 160, MOST_RUNS = (CHECKED - RUN_AT) / 8 };

typedef struct {
    Py_buffer buckets, words, records;
    Py_ssize_t units, unit_bytes;
    uint32_t crc_of[256];
} Index;

typedef struct {
    uint64_t slot, word, nbytes;
} Found;

static uint64_t read_u64(const char *at) {
    uint64_t number;
    memcpy(&number, at, sizeof number);
    return number;
}

static uint32_t read_u32(const char *at) {
    uint32_t number;
    memcpy(&number, at, sizeof number);
    return number;
}

/* CRC-32 as of zlib. */
static void make_crc(Index *index) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? 0xEDB88320u ^ (crc >> 1) : crc >> 1;
        index->crc_of[byte] = crc;
    }
}

static uint32_t crc32(const Index *index, const char *at, size_t size) {
    uint32_t crc = ~0u;
    for (size_t byte = 0; byte < size; byte++)
        crc = index->crc_of[(crc ^ (uint8_t)at[byte]) & 0xFF] ^ (crc >> 8);
    return ~crc;
}

static uint64_t word_of(const Index *index, uint64_t slot) {
    return __atomic_load_n((const uint64_t *)index->words.buf + slot, __ATOMIC_ACQUIRE);
}

/* Returns whether a record is whole, of this generation and key, and its runs lie in the file and hold its value. */
static bool is_record_of(const Index *index, const char *record, uint64_t word, const char *key, Py_ssize_t size) {
    uint64_t room = 0;
    uint32_t runs = read_u32(record + RUNS_AT);
    if (read_u32(record + CHECKED) != crc32(index, record, CHECKED) || read_u64(record + GENERATION_AT) != word >> 2)
        return false;
    if (memcmp(record, key, (size_t)size) != 0 || (size < KEY && record[size] != 0) || runs < 1 || runs > MOST_RUNS)
        return false;
    for (uint32_t run = 0; run < runs; run++) {
        uint64_t first = read_u32(record + RUN_AT + 8 * run), units = read_u32(record + RUN_AT + 8 * run + 4);
        if (first + units > (uint64_t)index->units)
            return false;
        room += units;
    }
    return room * (uint64_t)index->unit_bytes >= read_u64(record + NBYTES_AT);
}

static bool look_at(const Index *index, uint64_t slot, const char *key, Py_ssize_t size, Found *found) {
    char record[RECORD];
    if (slot >= (uint64_t)index->units)
        return false;
    uint64_t word = word_of(index, slot);
    if ((word & STATE) != READY)
        return false;
    memcpy(record, (const char *)index->records.buf + slot * RECORD, RECORD);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (!is_record_of(index, record, word, key, size) || word_of(index, slot) != word)
        return false;
    *found = (Found){slot, word, read_u64(record + NBYTES_AT)};
    return true;
}

static bool find(const Index *index, const char *key, Py_ssize_t size, Found *found) {
    uint64_t digest = XXH3_64bits(key, (size_t)size);
    uint64_t mask = (uint64_t)index->buckets.len / (WAYS * 8) - 1;
    uint64_t buckets[2] = {digest & mask, ((digest >> 12) ^ 1) & mask};
    for (int number = 0; number < 2; number++) {
        if (number == 1 && buckets[1] == buckets[0])
            break;
        for (int way = 0; way < WAYS; way++) {
            uint64_t packed = read_u64((const char *)index->buckets.buf + (buckets[number] * WAYS + (uint64_t)way) * 8);
            uint64_t slot = packed & 0xFFFFFFFFu;
            if (packed >> 32 == digest >> 32 && slot > 0 && look_at(index, slot - 1, key, size, found))
                return true;
        }
    }
    return false;
}

static PyObject *find_all(const Index *index, PyObject *keys) {
    PyObject *found = PyList_New(PyList_Size(keys));
    for (Py_ssize_t at = 0; found != NULL && at < PyList_Size(found); at++) {
        Py_ssize_t size = 0;
        Found value;
        PyObject *key = PyList_GetItem(keys, at), *result = NULL;
        const char *text = key == NULL ? NULL : PyUnicode_AsUTF8AndSize(key, &size);
        if (text != NULL && size >= 1 && size <= KEY && find(index, text, size, &value))
            result = Py_BuildValue("(KKK)", value.slot, value.word, value.nbytes);
        else if (text != NULL)
            Py_INCREF(result = Py_None);
        if (result == NULL || PyList_SetItem(found, at, result) < 0)
            Py_CLEAR(found);
    }
    return found;
}

static bool is_ordinary(const Index *index) {
    uint64_t buckets = (uint64_t)index->buckets.len / (WAYS * 8);
    const uint16_t one = 1;
    return *(const char *)&one == 1 && buckets > 0 && (buckets & (buckets - 1)) == 0 &&
           index->buckets.len % (WAYS * 8) == 0 && index->units > 0 && index->unit_bytes > 0 &&
           index->words.len / 8 == index->units && index->records.len / RECORD == index->units &&
           (uintptr_t)index->words.buf % 8 == 0;
}

/* find_file_values(buckets, words, records, unit_bytes, keys); see interface.py. */
PyObject *find_file_values(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (!has_arguments(count, 5))
        return NULL;
    Index index = {.unit_bytes = PyLong_AsSsize_t(args[3])};
    if (PyErr_Occurred())
        return NULL;
    if (!PyList_Check(args[4]))
        Py_RETURN_NONE;
    Py_buffer *buffers[3] = {&index.buckets, &index.words, &index.records};
    PyObject *found = NULL;
    int held = 0;
    while (held < 3 && PyObject_GetBuffer(args[held], buffers[held], PyBUF_SIMPLE) == 0)
        held++;
    if (held == 3) {
        index.units = index.words.len / 8;
        make_crc(&index);
        if (is_ordinary(&index))
            found = find_all(&index, args[4]);
        else
            Py_INCREF(found = Py_None);
    }
    while (held > 0)
        PyBuffer_Release(buffers[--held]);
    return found;
}
