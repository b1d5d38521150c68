package gemma4.mtp;

import gemma4.mtp.Specs.KVLayerSpec;
import gemma4.mtp.Specs.KVSpec;
import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;

/**
 * KV cache of committed rows. It owns the position: a row comes in by `commit` only, so a rejected row never lands.
 *
 * The text is cut into chunks of C positions. Rows of closed chunks are the past, the open chunk is the tail: a token
 * sees every key at the same place of the same sum, alone or in a block, as long as no call crosses a chunk's end
 * (`room`). Full layers keep a row per position; sliding layers a ring of the last W rows of closed chunks (slot =
 * position mod W); the sliding donor also a ring of the last W rows of all, which the drafter reads. Rows narrower than
 * float32 are made from their float32 rows, which stay until their chunk closes. See runtime_py/cache.py.
 *
 * Legend: P past rows, T new rows, C rows of a chunk, W window, g query heads per kv head.
 */
public final class KvCache {
    static final float MASKED = -1e9f;

    public final int maxContextTokens;
    final KVSpec spec;
    private final int group;
    private final int window;
    private final int chunk;
    private final boolean exact; // whether committed rows are the float32 rows themselves
    private final KvRows[] past;
    private final KvRows[] tail; // null: the open chunk lies in past
    private final KvRows[] closed; // of sliding layers; past itself where no rows beyond the window are kept
    private final KvRows donorRing;
    private final int[] positions; // of each ring slot
    private final Tensor fullMask;
    private int length;
    private int floor; // a rewind leaves holes below it in the rings of closed chunks

    /** marginRows: how far behind the open chunk `rewind` reaches, at the price of a second ring. */
    public KvCache(KVSpec spec, int group, int maxContextTokens, int marginRows) {
        this.spec = spec;
        this.group = group;
        this.maxContextTokens = maxContextTokens;
        window = Numbers.toInt(spec.window, "kv.window");
        chunk = Numbers.toInt(spec.chunkRows, "kv.chunk_rows");
        exact = spec.dtype.equals("float32");
        int layers = spec.layers.size();
        past = new KvRows[layers];
        tail = new KvRows[layers];
        closed = new KvRows[layers];
        int whole = (maxContextTokens + chunk - 1) / chunk * chunk;
        for (KVLayerSpec layer : spec.layers) {
            int i = (int) layer.layer;
            boolean sliding = layer.type.equals(Manifest.SLIDING);
            past[i] = rows(layer, sliding ? window : whole, spec.dtype);
            tail[i] = sliding || !exact ? rows(layer, chunk, "float32") : null;
            closed[i] = !sliding ? null : marginRows > 0 ? rows(layer, window + marginRows, spec.dtype) : past[i];
        }
        donorRing = rows(spec.layers.get(donor(Manifest.SLIDING)), window, spec.dtype);
        positions = new int[window];
        Arrays.fill(positions, -1);
        fullMask = Tensor.floats(1, maxContextTokens);
    }

    private static KvRows rows(KVLayerSpec layer, int capacity, String dtype) {
        int heads = Numbers.toInt(layer.kvHeads, "kv_heads");
        return new KvRows(capacity, heads, Numbers.toInt(layer.headDim, "head_dim"), dtype);
    }

    int donor(String kind) {
        return (int) (long) spec.donors.get(kind);
    }

    /** Committed rows; the next row's position. */
    public int length() {
        return length;
    }

    /** First position of the open chunk. */
    int start() {
        return length - length % chunk;
    }

    /** Rows that the open chunk still takes, at least 1: the most tokens of one call. */
    public int room() {
        return chunk - length % chunk;
    }

    private boolean sliding(int layer) {
        return spec.layers.get(layer).type.equals(Manifest.SLIDING);
    }

    /** Feeds prefix + part + suffix: rows of closed chunks, views; at least one, a dead row that the masks hide. */
    void feedPast(Map<String, Tensor> feeds, int layer, String prefix, String suffix) {
        int count = Math.max(1, sliding(layer) ? Math.min(start(), window) : start());
        feed(feeds, past[layer], count, prefix, suffix);
    }

    /** Feeds k, v float32 [C, kv, D] of the open chunk: views; zero from the position on. */
    void feedTail(Map<String, Tensor> feeds, int layer, String prefix, String suffix) {
        KvRows rows = tail[layer] == null ? past[layer] : tail[layer];
        int first = tail[layer] == null ? start() : 0;
        feeds.put(prefix + "k" + suffix, rows.view(0, first, chunk));
        feeds.put(prefix + "v" + suffix, rows.view(1, first, chunk));
    }

    /** Feeds all committed rows of the donor that a type's drafter layers read. */
    void feedDonor(Map<String, Tensor> feeds, String kind, String suffix) {
        boolean sliding = kind.equals(Manifest.SLIDING);
        int count = Math.max(1, sliding ? Math.min(length, window) : length);
        feed(feeds, sliding ? donorRing : past[donor(kind)], count, "", suffix);
    }

    private static void feed(Map<String, Tensor> feeds, KvRows rows, int count, String prefix, String suffix) {
        for (int part = 0; part < rows.partCount(); part++) {
            feeds.put(prefix + rows.partName(part) + suffix, rows.view(part, 0, count));
        }
    }

    /**
     * Where T = rows new tokens stand, at most `room`: additive masks, a row per (token, query head of a group), but
     * one row for all in mask_past_full; place [C, T], 1 at the slot of each new row.
     */
    Map<String, Tensor> layout(int rows) {
        if (rows < 1 || rows > room()) {
            throw new IllegalArgumentException(rows + " rows, room for " + room());
        }
        int[] old = Arrays.copyOf(positions, Math.max(1, Math.min(start(), window)));
        int[] open = new int[chunk];
        for (int i = 0; i < chunk; i++) {
            open[i] = start() + i;
        }
        Map<String, Tensor> layout = new HashMap<>();
        layout.put("mask_past_sliding", mask(rows, old, window));
        layout.put("mask_tail_sliding", mask(rows, open, window));
        layout.put("mask_tail_full", mask(rows, open, Integer.MAX_VALUE));
        layout.put("mask_past_full",
            start() > 0 ? firstColumns(fullMask, start()) : Tensor.floats(new float[] {MASKED}, 1, 1));
        float[] place = new float[chunk * rows];
        for (int row = 0; row < rows; row++) {
            place[(length - start() + row) * rows + row] = 1;
        }
        layout.put("place", Tensor.floats(place, chunk, rows));
        return layout;
    }

    /** [rows * g, keys]: a key is seen from its own position on, as long as it is less than `reach` behind. */
    private Tensor mask(int rows, int[] keys, int reach) {
        Tensor mask = Tensor.floats(rows * group, keys.length);
        FloatBuffer out = mask.floats();
        float[] line = new float[keys.length];
        for (int row = 0; row < rows; row++) {
            int query = length + row;
            for (int i = 0; i < keys.length; i++) {
                line[i] = keys[i] >= 0 && keys[i] <= query && query - keys[i] < reach ? 0 : MASKED;
            }
            for (int head = 0; head < group; head++) {
                out.put(line);
            }
        }
        return mask;
    }

    private static Tensor firstColumns(Tensor row, int count) {
        ByteBuffer view = row.bytes();
        view.limit(4 * count);
        return new Tensor(view, "float32", 1, count);
    }

    /** Append the first `rows` of the new float32 rows [T, kv, D] of every layer. */
    public void commit(Tensor[] newK, Tensor[] newV, int rows) {
        if (length + rows > maxContextTokens) {
            throw new ValueError("context is full: " + length + " + " + rows + " rows of " + maxContextTokens);
        }
        if (rows > room()) {
            throw new IllegalArgumentException(rows + " rows, room for " + room());
        }
        int first = length - start();
        for (int layer = 0; layer < past.length; layer++) {
            if (tail[layer] != null) {
                tail[layer].encode(first, newK[layer], newV[layer], 0, rows);
            }
            if (!sliding(layer)) {
                past[layer].encode(length, newK[layer], newV[layer], 0, rows);
            }
        }
        encodeRing(donorRing, length, newK[donor(Manifest.SLIDING)], newV[donor(Manifest.SLIDING)], 0, rows);
        if (rows == room()) {
            closeChunk();
        }
        length += rows;
    }

    private static void encodeRing(KvRows ring, int position, Tensor k, Tensor v, int from, int count) {
        for (int done = Math.max(0, count - ring.capacity); done < count;) {
            int slot = (position + done) % ring.capacity;
            int run = Math.min(count - done, ring.capacity - slot);
            ring.encode(slot, k, v, from + done, run);
            done += run;
        }
    }

    /** The open chunk of the sliding layers joins the past. */
    private void closeChunk() {
        for (int layer = 0; layer < past.length; layer++) {
            if (sliding(layer)) {
                Tensor k = tail[layer].view(0, 0, chunk);
                Tensor v = tail[layer].view(1, 0, chunk);
                encodeRing(past[layer], start(), k, v, 0, chunk);
                if (closed[layer] != past[layer]) {
                    encodeRing(closed[layer], start(), k, v, 0, chunk);
                }
            }
        }
        for (KvRows rows : tail) {
            if (rows != null) {
                rows.clear(0, chunk);
            }
        }
        for (int i = Math.max(0, chunk - window); i < chunk; i++) {
            positions[(start() + i) % window] = start() + i;
        }
    }

    /** The first position of which the sliding layers' rows are held. */
    private int oldest() {
        return Math.max(floor, start() - closed[donor(Manifest.SLIDING)].capacity);
    }

    /** The first position whose sliding rows a cache of `rows` rows has. */
    private int needed(int rows) {
        return Math.max(0, rows - rows % chunk - window);
    }

    /** Whether `rewind(rows)` can be exact: narrower rows go back only to where no chunk is open. */
    public boolean holds(int rows) {
        if (rows == 0 || (start() <= rows && rows <= length)) {
            return true;
        }
        return 0 < rows && rows < length && needed(rows) >= oldest() && (exact || rows % chunk == 0);
    }

    /** How many of the first `rows` rows an exact rewind can leave. */
    public int held(int rows) {
        int chunks = rows - rows % chunk;
        return holds(rows) ? rows : holds(chunks) ? chunks : 0;
    }

    /** Forget the rows from `rows` on: the cache is, bit for bit, what it was. ValueError if it holds too little. */
    public void rewind(int rows) {
        if (!holds(rows)) {
            throw new ValueError(
                "the cache of " + length + " rows cannot be rewound to " + rows + "; run the text again");
        }
        if (rows == length) {
            return;
        }
        int oldLength = length;
        int oldStart = start();
        int oldFloor = oldest();
        int first = needed(rows);
        KvRows[] sliding = new KvRows[past.length];
        for (int layer = 0; layer < past.length; layer++) { // before anything changes: there may be no memory for it
            sliding[layer] = sliding(layer) ? slidingRows(layer, first, rows) : null;
        }
        for (int layer = 0; layer < past.length; layer++) {
            if (!sliding(layer)) {
                past[layer].clear(rows, oldLength);
            }
        }
        length = rows;
        floor = rows > 0 ? oldFloor : 0;
        for (int layer = 0; layer < past.length; layer++) {
            if (tail[layer] != null) {
                tail[layer].clear(start() == oldStart ? rows - oldStart : 0, chunk);
                if (exact && start() < oldStart) {
                    tail[layer].copy(0, sliding[layer], start() - first, rows - start());
                }
            }
        }
        rebuild(sliding, first);
    }

    /** Copies of the committed rows of the positions first..end - 1. */
    private KvRows slidingRows(int layer, int first, int end) {
        KVLayerSpec entry = spec.layers.get(layer);
        KvRows rows = rows(entry, Math.max(1, end - first), spec.dtype);
        int inClosed = Math.max(first, Math.min(end, start()));
        for (int position = first; position < inClosed;) {
            int slot = position % closed[layer].capacity;
            int run = Math.min(inClosed - position, closed[layer].capacity - slot);
            rows.copy(position - first, closed[layer], slot, run);
            position += run;
        }
        int open = Math.max(first, start());
        if (end > open) {
            Tensor k = tail[layer].view(0, 0, chunk);
            rows.encode(open - first, k, tail[layer].view(1, 0, chunk), open - start(), end - open);
        }
        return rows;
    }

    /** Rings of W rows from the committed sliding rows of the positions first..length - 1 of each layer. */
    private void rebuild(KvRows[] sliding, int first) {
        for (int layer = 0; layer < past.length; layer++) {
            if (sliding[layer] != null) {
                past[layer].clear(0, window);
                past[layer].copyRing(first, sliding[layer], 0, start() - first);
            }
        }
        donorRing.clear(0, window);
        donorRing.copyRing(first, sliding[donor(Manifest.SLIDING)], 0, length - first);
        Arrays.fill(positions, -1);
        for (int position = first; position < start(); position++) {
            positions[position % window] = position;
        }
    }
}
