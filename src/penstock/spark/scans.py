"""The Java that ``relation`` compiles in the driver's JVM: a table with a source for each scan, and tables in SQL.

It is compiled by the compiler that Spark itself compiles queries with, which knows neither lambdas nor generics.
"""

CLASS = "penstock.spark.TableOfScans"
JAVA = """
package penstock.spark;

import java.net.URI;
import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.catalyst.TableIdentifier;
import org.apache.spark.sql.catalyst.analysis.UnresolvedRelation;
import org.apache.spark.sql.catalyst.catalog.CatalogTable;
import org.apache.spark.sql.catalyst.plans.logical.InsertIntoStatement;
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan;
import org.apache.spark.sql.catalyst.plans.logical.V2WriteCommand;
import org.apache.spark.sql.catalyst.rules.Rule;
import org.apache.spark.sql.catalyst.trees.TreeNode;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.connector.catalog.Identifier;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.SupportsPushDownFilters;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import scala.Function1;
import scala.Option;
import scala.collection.immutable.Seq;
import scala.runtime.AbstractFunction1;
import scala.runtime.AbstractPartialFunction;

public class TableOfScans extends PythonTable {
  public TableOfScans(PythonDataSourceV2 source, String name, StructType schema) {
    super(source, name, schema);
  }

  public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
    return new Builder(name(), schema(), options);
  }

  public static class Builder implements SupportsPushDownFilters, SupportsPushDownRequiredColumns {
    private final String name;
    private final CaseInsensitiveStringMap options;
    private StructType schema;
    private Filter[] filters = new Filter[0];

    public Builder(String name, StructType schema, CaseInsensitiveStringMap options) {
      this.name = name;
      this.schema = schema;
      this.options = options;
    }

    public Filter[] pushFilters(Filter[] filters) {
      this.filters = filters;
      return filters;
    }

    public Filter[] pushedFilters() {
      return new Filter[0];
    }

    public void pruneColumns(StructType wanted) {
      if (wanted.length() > 0) {
        schema = wanted;
      } else {
        schema = new StructType(new StructField[] {narrowest()});
      }
    }

    private StructField narrowest() {
      StructField[] fields = schema.fields();
      for (int i = 0; i < fields.length; i++) {
        if (fields[i].name().equals("position") || fields[i].name().equals("ordinal")) return fields[i];
      }
      return fields[0];
    }

    public Scan build() {
      PythonDataSourceV2 source = new PythonDataSourceV2();
      source.setShortName(name);
      ScanBuilder builder = new PythonTable(source, name, schema).newScanBuilder(options);
      if (filters.length > 0) ((SupportsPushDownFilters) builder).pushFilters(filters);
      return builder.build();
    }
  }

  // Given to a session's extensions: what it makes looks at every plan while it is resolved.
  public static class Queries extends AbstractFunction1 {
    private final boolean paths;

    public Queries(boolean paths) {
      this.paths = paths;
    }

    public Object apply(Object session) {
      return new Resolve((SparkSession) session, paths);
    }
  }

  public static class Resolve extends Rule {
    private final SparkSession session;
    private final boolean paths;

    public Resolve(SparkSession session, boolean paths) {
      this.session = session;
      this.paths = paths;
    }

    public TreeNode apply(TreeNode plan) {
      AbstractPartialFunction replace;
      if (paths) replace = new Paths(session); else replace = new Tables(session);
      return (TreeNode) ((LogicalPlan) plan).transformDownWithSubqueries(replace);
    }
  }

  // SELECT * FROM penstock.`/path` and INSERT INTO it: Spark itself has this for its own file formats only.
  public static class Paths extends AbstractPartialFunction {
    private final SparkSession session;

    public Paths(SparkSession session) {
      this.session = session;
    }

    public boolean isDefinedAt(Object node) {
      if (node instanceof InsertIntoStatement) return isPath(((InsertIntoStatement) node).table());
      return isPath(node);
    }

    static boolean isPath(Object node) {
      if (!(node instanceof UnresolvedRelation)) return false;
      Seq parts = ((UnresolvedRelation) node).multipartIdentifier();
      return parts.length() == 2 && "penstock".equalsIgnoreCase((String) parts.apply(0));
    }

    public Object applyOrElse(Object node, Function1 otherwise) {
      if (!isDefinedAt(node)) return otherwise.apply(node);
      if (node instanceof InsertIntoStatement) {  // its table is no child of it, and so not looked at otherwise
        InsertIntoStatement insert = (InsertIntoStatement) node;
        Object[] parts = new Object[insert.productArity()];
        for (int i = 0; i < parts.length; i++) {
          parts[i] = insert.productElement(i);
          if (parts[i] == insert.table()) parts[i] = loaded(insert.table());
        }
        return insert.makeCopy(parts);
      }
      LogicalPlan plan = loaded(node);
      if (!(plan instanceof DataSourceV2Relation)) return plan;
      DataSourceV2Relation relation = (DataSourceV2Relation) plan;
      return scanned(session, relation, new HashMap(relation.options().asCaseSensitiveMap()));
    }

    private LogicalPlan loaded(Object node) {
      String path = (String) ((UnresolvedRelation) node).multipartIdentifier().apply(1);
      return session.read().format("penstock").load(path).queryExecution().analyzed();
    }
  }

  // A table of the catalog: Spark makes it without the options that it was created with. And push-down for it.
  public static class Tables extends AbstractPartialFunction {
    private final SparkSession session;

    public Tables(SparkSession session) {
      this.session = session;
    }

    public boolean isDefinedAt(Object node) {
      if (node instanceof V2WriteCommand) return isBare(((V2WriteCommand) node).table());
      return isBare(node);
    }

    static boolean isBare(Object node) {
      if (!(node instanceof DataSourceV2Relation)) return false;
      DataSourceV2Relation relation = (DataSourceV2Relation) node;
      boolean ours = relation.table() instanceof PythonTable && relation.table().name().equalsIgnoreCase("penstock");
      return ours && relation.identifier().isDefined() && relation.options().get("path") == null;
    }

    public Object applyOrElse(Object node, Function1 otherwise) {
      if (!isDefinedAt(node)) return otherwise.apply(node);
      boolean write = node instanceof V2WriteCommand;  // its table is no child of it, and so not looked at otherwise
      Object table = node;
      if (write) table = ((V2WriteCommand) node).table();
      DataSourceV2Relation relation = (DataSourceV2Relation) table;
      Identifier name = (Identifier) relation.identifier().get();
      CatalogTable kept;
      try {
        kept = session.sessionState().catalog().getTableMetadata(
            new TableIdentifier(name.name(), Option.apply(name.namespace()[0])));
      } catch (Exception gone) {  // Spark tells of it
        return otherwise.apply(node);
      }
      Map options = new HashMap(relation.options().asCaseSensitiveMap());
      scala.collection.Iterator items = kept.storage().properties().iterator();
      while (items.hasNext()) {
        scala.Tuple2 item = (scala.Tuple2) items.next();
        options.put(item._1(), item._2());
      }
      if (kept.storage().locationUri().isDefined()) {
        URI place = (URI) kept.storage().locationUri().get();
        if ("file".equals(place.getScheme())) options.put("path", place.getPath());
        else options.put("path", place.toString());
      }
      if (write) return ((V2WriteCommand) node).withNewTable(with(relation, (PythonTable) relation.table(), options));
      return scanned(session, relation, options);
    }
  }

  // The relation with these options, and with a source for each scan where the session has push-down.
  static DataSourceV2Relation scanned(SparkSession session, DataSourceV2Relation relation, Map options) {
    PythonTable table = (PythonTable) relation.table();
    String enabled = session.sessionState().conf().getConfString("spark.sql.python.filterPushdown.enabled", "false");
    if (enabled.equals("true") && !"false".equalsIgnoreCase((String) options.get("pushdown"))) {
      options.put("pushdown", "true");
      // Spark gives a cached table's own relation, whose table must stay the same one for the cache to be found.
      if (!(table instanceof TableOfScans)) {
        table = new TableOfScans(new PythonDataSourceV2(), table.name(), table.schema());
      }
    }
    return with(relation, table, options);
  }

  static DataSourceV2Relation with(DataSourceV2Relation relation, PythonTable table, Map options) {
    return relation.copy(table, relation.output(), relation.catalog(), relation.identifier(),
        new CaseInsensitiveStringMap(options), relation.timeTravelSpec());
  }
}
"""
