package gemma4.mtp.app;

import android.app.Activity;
import android.os.Bundle;
import android.view.View;
import android.widget.Button;
import android.widget.TextView;

/** Plain and drafted decoding in turns on one text. */
public final class BenchmarkActivity extends Activity implements Engine.Screen {
    private static final String PROMPT = "Once upon a time there was a miller who had three sons.";
    private static final int TOKENS = 96;
    private static final int REPEATS = 3;

    private Engine engine;
    private TextView result;
    private Button run;

    @Override
    protected void onCreate(Bundle state) {
        super.onCreate(state);
        setContentView(R.layout.benchmark);
        engine = ((App) getApplication()).engine();
        result = (TextView) findViewById(R.id.result);
        run = (Button) findViewById(R.id.run);
        run.setOnClickListener(new View.OnClickListener() {
            @Override
            public void onClick(View view) {
                engine.benchmark(PROMPT, TOKENS, REPEATS);
                ready();
            }
        });
    }

    @Override
    protected void onResume() {
        super.onResume();
        engine.show(this);
        ready();
    }

    @Override
    public void status(String line) {
        result.setText(line);
    }

    @Override
    public void text(String piece) {}

    @Override
    public void ready() {
        run.setEnabled(engine.loaded() && !engine.busy());
    }
}
