package gemma4.mtp.app;

import android.os.Bundle;
import android.view.View;
import android.widget.Button;
import android.widget.TextView;
import java.util.Arrays;

/** How fast the loaded bundle is on this device, without and with drafts. */
public final class BenchmarkActivity extends EngineActivity {
    private static final int TOKENS = 64;
    private static final int REPEATS = 3;

    @Override
    int layout() {
        return R.layout.benchmark;
    }

    @Override
    protected void onCreate(Bundle state) {
        super.onCreate(state);
        findViewById(R.id.run).setOnClickListener(new View.OnClickListener() {
            @Override
            public void onClick(View view) {
                if (engine().busy()) {
                    engine().stop();
                } else {
                    String[] prompts = getResources().getStringArray(R.array.benchmark_prompts);
                    engine().benchmark(Arrays.asList(prompts), TOKENS, REPEATS);
                }
            }
        });
    }

    @Override
    public void changed() {
        Button run = (Button) findViewById(R.id.run);
        run.setText(engine().busy() ? R.string.stop : R.string.benchmark_run);
        run.setEnabled(engine().busy() || engine().loaded() != null);
        String failure = failureText();
        note(failure != null                 ? failure
                : engine().busy()            ? getString(R.string.working)
                : engine().loaded() == null  ? getString(R.string.no_bundle)
                                             : engine().loaded().bundle.getName());
        showProgress(0, 0);
        showResult();
    }

    @Override
    public void progress(String what, long done, long total) {
        note(getString(R.string.benchmark_progress, done, total));
        showProgress(done, total);
        showResult();
    }

    private void showResult() {
        Benchmark result = engine().benchmark();
        ((TextView) findViewById(R.id.result)).setText(result == null || !result.complete() ? "" : text(result));
    }

    private String text(Benchmark result) {
        String accepted = getString(
            R.string.benchmark_accepted, 100 * result.drafted.acceptance(), result.drafted.tokensPerRound());
        String drafted = getString(R.string.benchmark_drafted) + "\n" + speed(result.drafted) + "\n" + accepted;
        String off = result.offReason == null ? "" : "\n" + getString(R.string.drafting_off, result.offReason);
        return getString(R.string.benchmark_plain) + "\n" + speed(result.plain) + "\n\n" + drafted + "\n\n"
            + getString(R.string.benchmark_ratio, result.speedup()) + off + "\n"
            + getString(result.sameTexts ? R.string.benchmark_same : R.string.benchmark_other);
    }

    private String speed(Benchmark.Row row) {
        return getString(R.string.benchmark_speed, row.median(), row.lowest(), row.highest(), row.runs());
    }
}
