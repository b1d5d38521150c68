package gemma4.mtp.app;

import android.app.Activity;
import android.os.Bundle;
import android.view.View;
import android.widget.ArrayAdapter;
import android.widget.EditText;
import android.widget.Spinner;
import android.widget.Toast;
import gemma4.mtp.Costs;
import java.util.LinkedHashMap;
import java.util.Map;

/** Drafting, sampling, threads and context. A field that is left empty is the bundle's own, or the machine's. */
public final class SettingsActivity extends Activity {
    private final Map<String, Field> fields = new LinkedHashMap<>();
    private Settings settings;
    private Spinner drafting;

    /** A number and its bounds. */
    private static final class Field {
        private final EditText view;
        private final int name;
        private final double least;
        private final double most;

        private Field(EditText view, int name, double least, double most) {
            this.view = view;
            this.name = name;
            this.least = least;
            this.most = most;
        }
    }

    @Override
    protected void onCreate(Bundle state) {
        super.onCreate(state);
        setContentView(R.layout.settings);
        settings = ((App) getApplication()).settings();
        String[] choices = new String[Costs.MAX_DRAFT_TOKENS + 2];
        choices[0] = getString(R.string.drafting_auto);
        choices[1] = getString(R.string.drafting_off);
        for (int count = 1; count <= Costs.MAX_DRAFT_TOKENS; count++) {
            choices[count + 1] = getString(R.string.drafting_fixed, count);
        }
        drafting = (Spinner) findViewById(R.id.drafting);
        drafting.setAdapter(new ArrayAdapter<>(this, android.R.layout.simple_spinner_dropdown_item, choices));
        drafting.setSelection(settings.draftTokens() + 1);
        add("temperature", R.id.temperature, R.string.temperature, 0, 100);
        add("top_k", R.id.top_k, R.string.top_k, 0, 1000000);
        add("top_p", R.id.top_p, R.string.top_p, 0.0001, 1);
        add("threads", R.id.threads, R.string.threads, 1, Settings.MAX_THREADS);
        add("context", R.id.context, R.string.context, 16, 131072);
        findViewById(R.id.save).setOnClickListener(new View.OnClickListener() {
            @Override
            public void onClick(View view) {
                save();
            }
        });
    }

    private void add(String key, int id, int name, double least, double most) {
        EditText view = (EditText) findViewById(id);
        view.setText(settings.written(key));
        fields.put(key, new Field(view, name, least, most));
    }

    private void save() {
        Map<String, String> values = new LinkedHashMap<>();
        for (Map.Entry<String, Field> entry : fields.entrySet()) {
            Field field = entry.getValue();
            String text = field.view.getText().toString().trim();
            if (!text.isEmpty() && !isNumber(text, field.least, field.most)) {
                String line = getString(
                    R.string.not_a_number, getString(field.name), text, shown(field.least), shown(field.most));
                Toast.makeText(this, line, Toast.LENGTH_LONG).show();
                return;
            }
            values.put(entry.getKey(), text);
        }
        settings.save(drafting.getSelectedItemPosition() - 1, values);
        finish();
    }

    private static boolean isNumber(String text, double least, double most) {
        try {
            double value = Double.parseDouble(text);
            return value >= least && value <= most;
        } catch (NumberFormatException error) {
            return false;
        }
    }

    private static String shown(double value) {
        return value == Math.rint(value) ? String.valueOf((long) value) : String.valueOf(value);
    }
}
