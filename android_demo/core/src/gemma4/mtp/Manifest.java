package gemma4.mtp;

import gemma4.mtp.Specs.BackendSpec;
import gemma4.mtp.Specs.ChatSpec;
import gemma4.mtp.Specs.CheckpointSpec;
import gemma4.mtp.Specs.DrafterSpec;
import gemma4.mtp.Specs.FileSpec;
import gemma4.mtp.Specs.GraphSpec;
import gemma4.mtp.Specs.KVSpec;
import gemma4.mtp.Specs.SamplingSpec;
import gemma4.mtp.Specs.TargetSpec;
import gemma4.mtp.Specs.TokensSpec;
import java.io.File;
import java.io.FileInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.Charset;
import java.nio.charset.CodingErrorAction;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * What manifest.json holds, as records: the same fields, checks and sentences as runtime_py/manifest.py, whose
 * docstrings say what they mean. What the host does not use is read all the same, so that a manifest is refused alike.
 */
public final class Manifest {
    public static final int SCHEMA_VERSION = 4;
    public static final String NAME = "manifest.json";
    public static final String SLIDING = "sliding";
    public static final String FULL = "full";
    public static final String[] KINDS = {SLIDING, FULL};
    public static final Charset UTF_8 = Charset.forName("UTF-8");

    private static final Map<String, Integer> DTYPES = new LinkedHashMap<>();

    static {
        String[] names = {"int8", "uint8", "float16", "bfloat16", "int32", "float32"};
        int[] sizes = {1, 1, 2, 2, 4, 4};
        for (int i = 0; i < names.length; i++) {
            DTYPES.put(names[i], sizes[i]);
        }
    }

    public final String name;
    public final TargetSpec target;
    public final DrafterSpec drafter;
    public final KVSpec kv;
    public final Map<String, GraphSpec> graphs = new LinkedHashMap<>();
    public final Map<String, BackendSpec> backends = new LinkedHashMap<>();
    public final TokensSpec tokens;
    /** Null: no template, or one that is not made of such pieces. */
    public final ChatSpec chat;
    public final SamplingSpec sampling;
    public final Map<String, CheckpointSpec> checkpoints = new LinkedHashMap<>();
    public final Map<String, String> versions;
    public final Map<String, FileSpec> files = new LinkedHashMap<>();

    private Manifest(Object value) {
        Fields f = new Fields(value, "", "schema_version", "name", "target", "drafter", "kv", "graphs", "backends",
            "tokens", "chat", "sampling", "memory", "checkpoints", "versions", "files");
        f.integer("schema_version");
        name = f.string("name");
        target = new TargetSpec(f.get("target"), "target");
        drafter = new DrafterSpec(f.get("drafter"), "drafter");
        kv = new KVSpec(f.get("kv"), "kv");
        for (Map.Entry<String, Object> entry : f.map("graphs").entrySet()) {
            graphs.put(entry.getKey(), new GraphSpec(entry.getValue(), "graphs." + entry.getKey()));
        }
        for (Map.Entry<String, Object> entry : f.map("backends").entrySet()) {
            backends.put(entry.getKey(), new BackendSpec(entry.getValue(), "backends." + entry.getKey()));
        }
        tokens = new TokensSpec(f.get("tokens"), "tokens");
        chat = f.isNull("chat") ? null : new ChatSpec(f.get("chat"), "chat");
        sampling = new SamplingSpec(f.get("sampling"), "sampling");
        Fields memory =
            new Fields(f.get("memory"), "memory", "tables_bytes", "kv_sliding_bytes", "kv_full_bytes_per_token");
        memory.integer("tables_bytes");
        memory.integer("kv_sliding_bytes");
        memory.integer("kv_full_bytes_per_token");
        for (Map.Entry<String, Object> entry : f.map("checkpoints").entrySet()) {
            checkpoints.put(entry.getKey(), new CheckpointSpec(entry.getValue(), "checkpoints." + entry.getKey()));
        }
        versions = f.stringMap("versions");
        for (Map.Entry<String, Object> entry : f.map("files").entrySet()) {
            files.put(entry.getKey(), new FileSpec(entry.getValue(), "files." + entry.getKey()));
        }
    }

    /** What everyone who runs the bundle must know, or null. */
    public String warning() {
        for (CheckpointSpec spec : checkpoints.values()) {
            if (spec.source.equals("random weights")) {
                return "random weights: text means nothing";
            }
        }
        return null;
    }

    /** Read and check manifest.json of a bundle. ValueError names the file and the field that is wrong. */
    public static Manifest load(File bundle) {
        File path = new File(bundle, NAME);
        if (bundle.isFile()) {
            throw new ValueError(bundle + ": is a file; give the folder that an export wrote");
        }
        if (!bundle.isDirectory()) {
            throw new ValueError(
                bundle + ": no " + NAME + ": no such folder; give the one that an export wrote, or export it again");
        }
        if (!path.isFile()) {
            throw new ValueError(
                bundle + ": no " + NAME + ": not a bundle, or its export did not finish; export it again");
        }
        try {
            Object data = Json.parse(readText(path));
            Object version = data instanceof Map ? ((Map < ?, ? >) data).get("schema_version") : null;
            if (!Long.valueOf(SCHEMA_VERSION).equals(version) && !Double.valueOf(SCHEMA_VERSION).equals(version)) {
                throw new ValueError("schema_version is " + Json.repr(version) + ", this runtime reads "
                    + SCHEMA_VERSION + "; export the bundle again");
            }
            Manifest manifest = new Manifest(data);
            ManifestRules.check(manifest);
            return manifest;
        } catch (ValueError error) {
            throw new ValueError(path + ": " + error.getMessage());
        }
    }

    /** ValueError if a file is missing or has another size than the manifest says. */
    public void checkSizes(File bundle, Iterable<String> names) {
        for (String file : names) {
            File path = new File(bundle, file);
            long want = files.get(file).sizeBytes;
            if (!path.isFile()) {
                throw new ValueError(path + ": file is missing; export the bundle again");
            }
            if (path.length() != want) {
                throw new ValueError(path + ": has " + path.length() + " bytes, the manifest says " + want
                    + "; export the bundle again");
            }
        }
    }

    /** checkSizes, then ValueError if a file's bytes are not those that were exported. */
    public void checkHashes(File bundle, Iterable<String> names) {
        for (String file : names) {
            List<String> one = new ArrayList<>();
            one.add(file);
            checkSizes(bundle, one);
            String want = files.get(file).sha256;
            String found = sha256(new File(bundle, file));
            if (!found.equals(want)) {
                throw new ValueError(new File(bundle, file) + ": sha256 is " + found + ", the manifest says " + want
                    + "; the file is corrupt, export the bundle again");
            }
        }
    }

    /** The files of one graph: the model and, where it has one, its external data. */
    public List<String> graphFiles(String graph, String backend) {
        Map<String, String> paths = graphs.get(graph).files;
        if (!paths.containsKey(backend)) {
            String held = ManifestRules.join(paths.keySet());
            throw new ValueError("the bundle has " + graph + " for " + (held.isEmpty() ? "no backend" : held)
                + ", not for " + backend + "; export it");
        }
        List<String> found = new ArrayList<>();
        for (String file : files.keySet()) {
            if (file.equals(paths.get(backend)) || file.equals(paths.get(backend) + ".data")) {
                found.add(file);
            }
        }
        return found;
    }

    static Map<String, Integer> dtypes() {
        return DTYPES;
    }

    /**
     * Parts of committed rows of a dtype: k, v [rows, kv, D]; of int8 also float32 scales [rows, kv]. Null: no such
     * dtype.
     */
    static String[] kvParts(String dtype) {
        if (dtype.equals("int8")) {
            return new String[] {"k", "v", "k_scale", "v_scale"};
        }
        return dtype.equals("float32") || dtype.equals("float16") ? new String[] {"k", "v"} : null;
    }

    private static String readText(File path) {
        ByteBuffer bytes = ByteBuffer.wrap(readBytes(path));
        try {
            String text = UTF_8.newDecoder()
                              .onMalformedInput(CodingErrorAction.REPORT)
                              .onUnmappableCharacter(CodingErrorAction.REPORT)
                              .decode(bytes)
                              .toString();
            return text.replace("\r\n", "\n").replace('\r', '\n');
        } catch (CharacterCodingException error) {
            throw new ValueError("the file is no UTF-8 text: byte " + bytes.position() + " is wrong");
        }
    }

    private static byte[] readBytes(File path) {
        byte[] bytes = new byte[(int) Math.min(path.length(), 1 << 28)];
        try (InputStream input = new FileInputStream(path)) {
            int count = 0;
            for (int n; count < bytes.length && (n = input.read(bytes, count, bytes.length - count)) > 0;) {
                count += n;
            }
            return bytes;
        } catch (IOException error) {
            throw new ValueError(error.getMessage());
        }
    }

    static String sha256(File path) {
        try (InputStream input = new FileInputStream(path)) {
            MessageDigest digest = MessageDigest.getInstance("SHA-256");
            byte[] block = new byte[1 << 16];
            for (int n; (n = input.read(block)) > 0;) {
                digest.update(block, 0, n);
            }
            return String.format("%064x", new BigInteger(1, digest.digest()));
        } catch (IOException | NoSuchAlgorithmException error) {
            throw new ValueError(path + ": " + error.getMessage());
        }
    }
}
