package gemma4.mtp;

import java.io.BufferedReader;
import java.io.File;
import java.io.FileReader;
import java.io.IOException;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * How many threads to run by default: one per physical core, without the slowest class of cores where there are
 * several; a block is split evenly over the threads, so that one slow core holds up all others. As runtime_py/cpus.py.
 */
public final class Cpus {
    public static final File SYSFS = new File("/sys/devices/system/cpu");
    private static final String[] SPEEDS = {"cpu_capacity", "cpufreq/cpuinfo_max_freq"};
    private static final double SAME_CLASS = 0.9;

    private Cpus() {}

    /** available: what the runtime counts, for a system that tells nothing. */
    public static int defaultThreads(File sysfs, int available) {
        List<Long> speeds = speeds(sysfs);
        return speeds.isEmpty() ? Math.max(1, available) : withoutSlowestClass(speeds);
    }

    /** The speed of every physical core that is on, in any unit that they share; empty where nothing is told. */
    private static List<Long> speeds(File sysfs) {
        List<File> cpus = new ArrayList<>();
        File[] entries = sysfs.listFiles();
        for (File entry : entries == null ? new File[0] : entries) {
            if (entry.getName().matches("cpu[0-9]+") && !read(new File(entry, "online")).equals("0")) {
                cpus.add(entry);
            }
        }
        String known = known(cpus);
        Map<String, Long> cores = new LinkedHashMap<>();
        for (File cpu : cpus) { // CPUs of one core name the same siblings
            String siblings = read(new File(cpu, "topology/thread_siblings_list"));
            siblings = siblings.isEmpty() ? read(new File(cpu, "topology/thread_siblings")) : siblings;
            String core = siblings.isEmpty() ? cpu.getName() : siblings;
            long speed = known == null ? 1 : Long.parseLong(read(new File(cpu, known)));
            cores.put(core, Math.max(speed, cores.containsKey(core) ? cores.get(core) : 0));
        }
        return new ArrayList<>(cores.values());
    }

    /** The first of SPEEDS that every core has. */
    private static String known(List<File> cpus) {
        for (String name : SPEEDS) {
            boolean all = !cpus.isEmpty();
            for (File cpu : cpus) {
                all &= read(new File(cpu, name)).matches("[0-9]{1,18}");
            }
            if (all) {
                return name;
            }
        }
        return null;
    }

    private static int withoutSlowestClass(List<Long> speeds) {
        Collections.sort(speeds, Collections.reverseOrder());
        int classes = 0;
        int last = 0; // where the slowest class begins
        for (int i = 0; i < speeds.size(); i++) {
            if (i == 0 || speeds.get(i) < SAME_CLASS * speeds.get(last)) {
                classes++;
                last = i;
            }
        }
        return classes > 1 ? last : speeds.size();
    }

    /** Without spaces around it; nothing where it cannot be read, as in Android's sandbox. */
    private static String read(File path) {
        try (BufferedReader reader = new BufferedReader(new FileReader(path))) {
            String line = reader.readLine();
            return line == null ? "" : line.trim();
        } catch (IOException error) {
            return "";
        }
    }
}
