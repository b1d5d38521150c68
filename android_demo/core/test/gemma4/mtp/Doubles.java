package gemma4.mtp;

import gemma4.mtp.Specs.KVLayerSpec;
import gemma4.mtp.Specs.KVSpec;
import java.nio.FloatBuffer;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.zip.CRC32;

/**
 * A target and a drafter without a model, over the real cache: tests/doubles.py in Java. The text is a hash of all
 * rows that cache and masks show, so a row committed too much, too little or at a wrong place changes it.
 */
final class Doubles {
    static final int VOCAB = 4999;
    static final int EOS = 1;
    private static final int GROUP = 2;

    private Doubles() {}

    static final class Script {
        final int window;
        private final List<Long> stops;
        private final int period; // above 0: a text that repeats itself

        Script(int window, List<Long> stops, int period) {
            this.window = window;
            this.stops = stops;
            this.period = period;
        }

        int nextToken(TreeMap<Integer, Integer> full, TreeMap<Integer, Integer> sliding) {
            if (period > 0) {
                return 10 + full.size() % period;
            }
            if (stops.contains((long) full.size())) {
                return EOS;
            }
            CRC32 hash = new CRC32();
            hash.update(("(" + pairs(full) + ", " + pairs(sliding) + ")").getBytes(Manifest.UTF_8));
            return 3 + (int) (hash.getValue() % (VOCAB - 3));
        }

        /** As Python writes sorted(rows.items()). */
        private static String pairs(TreeMap<Integer, Integer> rows) {
            StringBuilder text = new StringBuilder();
            for (Map.Entry<Integer, Integer> row : rows.entrySet()) {
                text.append(text.length() > 0 ? ", " : "").append("(" + row.getKey() + ", " + row.getValue() + ")");
            }
            return "[" + text + "]";
        }

        /** The next token of a text that every layer sees as it should. */
        int after(IntList ids) {
            TreeMap<Integer, Integer> full = new TreeMap<>();
            TreeMap<Integer, Integer> sliding = new TreeMap<>();
            for (int i = 0; i < ids.size(); i++) {
                full.put(i, ids.get(i));
                if (i > ids.size() - 1 - window) {
                    sliding.put(i, ids.get(i));
                }
            }
            return nextToken(full, sliding);
        }
    }

    /** Every KV row is [token, position], values are the negated keys. It records the calls and turns the clock. */
    static final class ScriptedTarget implements Target, Clock {
        final List<int[]> calls = new ArrayList<>(); // first position and rows of each
        double now;
        private final Script script;
        private final int chunkRows;
        private final int context;
        private final double perRow;

        ScriptedTarget(Script script, int chunkRows, int context, double perRow) {
            this.script = script;
            this.chunkRows = chunkRows;
            this.context = context;
            this.perRow = perRow;
        }

        @Override
        public double seconds() {
            return now;
        }

        @Override
        public int vocabSize() {
            return VOCAB;
        }

        @Override
        public int maxContextTokens() {
            return context;
        }

        @Override
        public KvCache newCache(int maxContextTokens, int marginRows) {
            List<KVLayerSpec> layers = new ArrayList<>();
            layers.add(new KVLayerSpec(0, Manifest.SLIDING, 1, 2));
            layers.add(new KVLayerSpec(1, Manifest.FULL, 1, 2));
            Map<String, Long> donors = new HashMap<>();
            donors.put(Manifest.SLIDING, 0L);
            donors.put(Manifest.FULL, 1L);
            KVSpec spec = new KVSpec(script.window, chunkRows, layers, donors, "float32");
            return new KvCache(spec, GROUP, maxContextTokens, marginRows);
        }

        @Override
        public Output forward(KvCache cache, int[] ids, boolean lastRowOnly) {
            calls.add(new int[] {cache.length(), ids.length});
            now += 1 + perRow * (ids.length - 1);
            Tensor[] k = newRows(cache, ids, 1);
            Map<String, Tensor> layout = cache.layout(ids.length);
            Tensor logits = Tensor.floats(lastRowOnly ? 1 : ids.length, VOCAB);
            Tensor hidden = Tensor.floats(lastRowOnly ? 1 : ids.length, 1);
            for (int row = lastRowOnly ? ids.length - 1 : 0; row < ids.length; row++) {
                TreeMap<Integer, Integer> full = seen(cache, 1, "full", k[1], layout, row);
                int next = script.nextToken(full, seen(cache, 0, "sliding", k[0], layout, row));
                logits.floats().put((lastRowOnly ? 0 : row) * VOCAB + next, 1);
            }
            return new Output(logits, hidden, k, newRows(cache, ids, -1));
        }

        @Override
        public void append(KvCache cache, int[] ids) {
            calls.add(new int[] {cache.length(), ids.length});
            cache.commit(newRows(cache, ids, 1), newRows(cache, ids, -1), ids.length);
        }

        private static Tensor[] newRows(KvCache cache, int[] ids, int sign) {
            Tensor rows = Tensor.floats(ids.length, 1, 2);
            FloatBuffer out = rows.floats();
            for (int i = 0; i < ids.length; i++) {
                out.put(sign * ids[i]).put(sign * (cache.length() + i));
            }
            return new Tensor[] {rows, rows};
        }

        /** Position -> token of the rows that the masks show to a row of the call. */
        private static TreeMap<Integer, Integer> seen(
            KvCache cache, int layer, String kind, Tensor fresh, Map<String, Tensor> layout, int row) {
            Map<String, Tensor> feeds = new HashMap<>();
            cache.feedPast(feeds, layer, "past_", "");
            cache.feedTail(feeds, layer, "tail_", "");
            float[] past = layout.get("mask_past_" + kind).row(kind.equals("full") ? 0 : row * GROUP);
            float[] tail = layout.get("mask_tail_" + kind).row(row * GROUP);
            TreeMap<Integer, Integer> seen = new TreeMap<>();
            for (int i = 0; i < past.length; i++) {
                if (past[i] == 0) {
                    add(seen, feeds.get("past_k").row(i), feeds.get("past_v").row(i));
                }
            }
            for (int slot = 0; slot < tail.length; slot++) {
                if (tail[slot] == 0) {
                    float[] k = feeds.get("tail_k").row(slot);
                    float[] v = feeds.get("tail_v").row(slot);
                    float[] place = layout.get("place").row(slot);
                    for (int i = 0; i < place.length; i++) {
                        for (int axis = 0; axis < 2; axis++) {
                            k[axis] += place[i] * fresh.row(i)[axis];
                            v[axis] -= place[i] * fresh.row(i)[axis];
                        }
                    }
                    add(seen, k, v);
                }
            }
            return seen;
        }
    }

    private static void add(TreeMap<Integer, Integer> rows, float[] k, float[] v) {
        boolean opposite = k[0] == -v[0] && k[1] == -v[1];
        if (!opposite || rows.put((int) k[1], (int) k[0]) != null) {
            throw new AssertionError("keys and values of different rows, or a position twice");
        }
    }

    /**
     * Right for exactly the first right[i mod n] drafts of block i, wrong after them. It sees the donors' rows alone.
     */
    static final class ScriptedDrafter implements Drafter {
        private final Script script;
        private final List<Long> right;
        private int blocks;

        ScriptedDrafter(Script script, List<Long> right) {
            this.script = script;
            this.right = right;
        }

        @Override
        public int[] draft(KvCache cache, int token, float[] hidden, int count) {
            Map<String, Tensor> feeds = new HashMap<>();
            cache.feedDonor(feeds, Manifest.FULL, "");
            TreeMap<Integer, Integer> full = new TreeMap<>();
            for (int i = 0; i < cache.length(); i++) {
                add(full, feeds.get("k").row(i), feeds.get("v").row(i));
            }
            cache.feedDonor(feeds, Manifest.SLIDING, "");
            TreeMap<Integer, Integer> sliding = new TreeMap<>();
            for (int i = 0; i < Math.min(cache.length(), script.window); i++) {
                add(sliding, feeds.get("k").row(i), feeds.get("v").row(i));
            }
            if (!sliding.equals(new TreeMap<>(full.tailMap(cache.length() - script.window)))) {
                throw new AssertionError("the drafter's ring holds other rows than the last of the window");
            }
            IntList text = new IntList();
            for (int i = 0; i < cache.length(); i++) {
                text.add(full.get(i));
            }
            text.add(token);
            long good = right.get(blocks++ % right.size());
            int[] drafts = new int[count];
            for (int i = 0; i < count; i++) {
                int next = script.after(text);
                drafts[i] = i < good ? next : 3 + (next + 1 - 3) % (VOCAB - 3);
                text.add(drafts[i]);
            }
            return drafts;
        }
    }
}
